"""Every method against the independent NumPy reference, to 1e-10 over several rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import reference
from conftest import small_federation
from fedadc.data.batches import shuffled
from fedadc.federation.federation import Federation
from fedadc.federation.local import LocalWork
from fedadc.federation.schedule import Exponential
from fedadc.methods import FedADC, FedADCDouble, FedAvg, Method, SlowMo
from fedadc.models import Logistic
from fedadc.objectives import CrossEntropy, Objective, SelfConfidence
from fedadc.rng import generator

METHODS: dict[str, tuple[Method, str, dict[str, float]]] = {
    "fedavg": (FedAvg(), "fedavg", {}),
    "slowmo": (SlowMo(beta=0.7, server_lr=0.8), "slowmo", {"beta": 0.7, "alpha": 0.8}),
    "heavy-ball": (FedADC(beta=0.8), "fedadc heavy-ball", {"beta": 0.8, "beta_local": 0.8}),
    "nesterov": (FedADC(beta=0.8, nesterov=True), "fedadc nesterov", {"beta": 0.8, "beta_local": 0.8}),
    "two betas": (
        FedADC(beta=0.9, beta_local=0.5, nesterov=True, server_lr=1.2),
        "fedadc nesterov",
        {"beta": 0.9, "beta_local": 0.5, "alpha": 1.2},
    ),
    "double": (
        FedADCDouble(beta=0.8, phi=0.6, server_lr=0.9),
        "fedadc double",
        {"beta": 0.8, "beta_local": 0.8, "phi": 0.6, "alpha": 0.9},
    ),
}
OBJECTIVES: dict[str, tuple[Objective, Any]] = {
    "cross_entropy": (CrossEntropy(), reference.cross_entropy),
    "received": (SelfConfidence(lam=0.4, tau=1.0), reference.self_confidence(0.4, 1.0, "received")),
    "tau": (SelfConfidence(lam=0.4, tau=2.5), reference.self_confidence(0.4, 2.5, "received")),
    "tau squared": (
        SelfConfidence(lam=0.4, tau=2.5, tau_squared=True),
        reference.self_confidence(0.4, 2.5, "received", tau_squared=True),
    ),
    "self": (SelfConfidence(lam=0.4, tau=1.5, teacher="self"), reference.self_confidence(0.4, 1.5, "self")),
}  # fmt: skip
WORK = {
    "steps": LocalWork(steps=5, batch_size=4, lr=0.3),
    "epochs": LocalWork(epochs=2, batch_size=4, lr=0.3, schedule=Exponential(gamma=0.8)),  # unequal H, changing lr
    "all": LocalWork(
        epochs=2, batch_size=4, lr=0.3, weight_decay=0.05, clip=0.5, momentum=0.6, schedule=Exponential(gamma=0.8)
    ),
}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_method_equals_numpy(method: Any, objective: Any, work: LocalWork, weighting: Any) -> None:
    ours, name, settings = method
    if name == "fedadc double":
        work = replace(work, momentum=0.0)
    data = small_federation()
    torch.manual_seed(1)
    federation = Federation(
        model=Logistic((5,), 4).double(), data=data, method=replace(ours, objective=objective[0]), local=work, cohort=3,
        weighting=weighting, seed=3,
    )  # fmt: skip
    held = federation.clients
    rounds, done = [], None
    for done in federation.rounds(6):
        batches = {
            k: list(shuffled(len(held[k]), 4, work.steps, work.epochs, generator(3, "batches", done.round, k)))
            for k in done.cohort
        }
        rounds.append((done.lr, batches))
    assert done is not None
    x, y = data.train.x.numpy(), data.train.y.numpy()
    problem = reference.Problem(
        [x[held[k]] for k in range(6)], [y[held[k]] for k in range(6)], 4, work.weight_decay, work.clip, work.momentum
    )
    start = federation.start().theta.numpy()
    theta, m = reference.train(problem, start, rounds, name, objective[1], weights=weighting, **settings)
    assert np.abs(theta - start).max() > 1e-2  # it moved
    np.testing.assert_allclose(done.state.theta.numpy(), theta, rtol=0, atol=1e-10)
    if "m" in done.state.server:
        np.testing.assert_allclose(done.state.server["m"].numpy(), m, rtol=0, atol=1e-10)
