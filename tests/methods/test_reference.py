"""Every method with every objective against the independent NumPy reference, to 1e-10 after every round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import reference
from conftest import numbers_federation, small_federation
from fedadc.data.batches import shuffled
from fedadc.federation import Federation
from fedadc.methods import (
    Ditto,
    FedAdagrad,
    FedAdam,
    FedADC,
    FedADCDouble,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedDyn,
    FedNova,
    FedPer,
    FedProx,
    FedRep,
    FedYogi,
    LocalOnly,
    Scaffold,
    SlowMo,
)
from fedadc.models import MLP
from fedadc.objectives import (
    CrossEntropy,
    GlobalDistillation,
    ModelContrast,
    NotTrueDistillation,
    RestrictedSoftmax,
    SelfConfidence,
    SquaredError,
)
from fedadc.rng import generator
from fedadc.schedules import Exponential
from fedadc.views.local_work import LocalWork

CLIENTS, ROUNDS, SEED = 6, 6, 3


def pair(ours: Callable[..., Any], theirs: Callable[..., Any], **settings: Any) -> tuple[Any, Any]:
    return ours(**settings), theirs(**settings)


METHODS = {
    "fedavg": pair(FedAvg, reference.fedavg),
    "slowmo": pair(SlowMo, reference.slowmo, beta=0.7, server_lr=0.8),
    "heavy-ball": pair(FedADC, reference.fedadc, beta=0.8),
    "nesterov": pair(FedADC, reference.fedadc, beta=0.8, nesterov=True),
    "two betas": pair(FedADC, reference.fedadc, beta=0.9, beta_local=0.5, nesterov=True, server_lr=1.2),
    "double": pair(FedADCDouble, reference.fedadc_double, beta=0.8, phi=0.6, server_lr=0.9),
    "fedprox": pair(FedProx, reference.fedprox, mu=0.3),
    "fednova": pair(FedNova, reference.fednova),
    "fednova, all": pair(FedNova, reference.fednova, mu=0.1, beta=0.4, server_lr=0.8),
    "feddyn": pair(FedDyn, reference.feddyn, alpha=0.3, alpha_by_size=False),
    "feddyn by size": pair(FedDyn, reference.feddyn, alpha=0.3, alpha_by_size=True),
    "scaffold": pair(Scaffold, reference.scaffold, server_lr=0.9),
    "fedavgm": pair(FedAvgM, reference.fedavgm, beta=0.7, server_lr=0.8),
    "fedadam": pair(FedAdam, reference.fedadam, beta1=0.8, beta2=0.9, tau=0.01, server_lr=0.1),
    "fedyogi": pair(FedYogi, reference.fedyogi, beta1=0.8, beta2=0.9, tau=0.01, server_lr=0.1),
    "fedadagrad": pair(FedAdagrad, reference.fedadagrad, beta1=0.4, tau=0.01, server_lr=0.1),
    "fedper": pair(FedPer, reference.fedper),
    "fedrep": pair(FedRep, reference.fedrep, head_share=0.6),
    "fedbabu": pair(FedBABU, reference.fedbabu),
    "ditto": pair(Ditto, reference.ditto, lam=0.3),
    "local_only": pair(LocalOnly, reference.local_only),
}
OBJECTIVES = {
    "cross_entropy": pair(CrossEntropy, reference.cross_entropy),
    "received": pair(SelfConfidence, reference.self_confidence, lam=0.4, tau=1.0, teacher="received"),
    "tau": pair(SelfConfidence, reference.self_confidence, lam=0.4, tau=2.5, teacher="received"),
    "tau squared": pair(SelfConfidence, reference.self_confidence, lam=0.4, tau=2.5, tau_squared=True),
    "self": pair(SelfConfidence, reference.self_confidence, lam=0.4, tau=1.5, teacher="self"),
    "restricted": pair(RestrictedSoftmax, reference.restricted_softmax, alpha=0.5, soft=False),
    "restricted softly": pair(RestrictedSoftmax, reference.restricted_softmax, alpha=0.3, soft=True),
    "not true": pair(NotTrueDistillation, reference.not_true_distillation, beta=0.7, tau=1.0),
    "not true, tau": pair(NotTrueDistillation, reference.not_true_distillation, beta=0.7, tau=2.5),
    "global": pair(GlobalDistillation, reference.global_distillation, lam=0.6, tau=0.5, window=1),
    "global, window": pair(GlobalDistillation, reference.global_distillation, lam=0.6, tau=2.0, window=3),
    "contrast": pair(ModelContrast, reference.model_contrast, mu=2.0, tau=0.5),
    "squared": pair(SquaredError, reference.squared_error),
}
WORK = {
    "steps": LocalWork(steps=5, batch_size=4, lr=0.3),
    "epochs": LocalWork(epochs=2, batch_size=4, lr=0.3, schedule=Exponential(gamma=0.8)),  # unequal H, changing lr
    "all": LocalWork(
        epochs=2, batch_size=4, lr=0.3, weight_decay=0.05, clip=0.5, momentum=0.6, schedule=Exponential(gamma=0.8)
    ),
}
WITHOUT_GLOBAL_MODEL = {"cross_entropy", "self", "restricted", "restricted softly", "squared"}  # they need none


def weightings(method: str) -> list[str]:
    return ["uniform"] if method.startswith("feddyn") else ["uniform", "samples"]


def together(method: str, objective: str) -> bool:
    return method not in ("local_only", "fedper", "fedrep") or objective in WITHOUT_GLOBAL_MODEL


class Match:
    """The package and the reference on the same federation, side by side."""

    def __init__(self, method: str, objective: str = "cross_entropy", work: str = "all", weighting: Any = "uniform"):
        local = self.local = WORK[work]
        if method in ("double", "scaffold", "ditto"):  # they refuse local momentum
            local = self.local = replace(local, momentum=0.0)
        projection = {"projection": 6} if objective == "contrast" else {}
        (our_method, their_method), (our_objective, their_objective) = METHODS[method], OBJECTIVES[objective]
        data = numbers_federation(clients=CLIENTS) if objective == "squared" else small_federation(clients=CLIENTS)
        outputs = data.task.outputs[0]
        torch.manual_seed(1)
        self.federation = Federation(
            model=MLP((5,), outputs, hidden=[7], **projection).double(),
            data=data,
            method=replace(our_method, objective=our_objective),
            local=local,
            cohort=3,
            weighting=weighting,
            seed=SEED,
        )
        shares = [self.federation.clients[k] for k in range(CLIENTS)]
        self.sizes = np.array([len(positions) for positions in shares])
        self.problem = reference.Problem(
            network=reference.mlp(5, 7, outputs, **projection),
            x=[data.train.x.numpy()[positions] for positions in shares],
            y=[self.labels()[positions] for positions in shares],
            method=their_method,
            objective=their_objective,
            weighting=weighting,
            weight_decay=local.weight_decay,
            clip=local.clip,
            momentum=local.momentum,
        )

    def labels(self) -> Any:
        """The labels of all training samples; numbers are scaled by their mean and standard deviation."""
        y = self.federation.data.train.y.numpy()
        if y.ndim == 1:
            return y
        spread = [float(f"{value:.6g}") for value in y.std(axis=0)]
        center = [round(m, 5 - math.floor(math.log10(s))) for m, s in zip(y.mean(axis=0), spread, strict=True)]
        return (y - center) / spread

    def batches(self, t: int, k: int) -> list[Any]:
        rng = generator(SEED, "batches", t, k)
        return list(shuffled(self.sizes[k], self.local.batch_size, self.local.steps, self.local.epochs, rng))

    def play(self, lost: Callable[[], set[int]] = set) -> Iterator[Any]:
        """Yield the package's state after every round, checked against the reference's."""
        first = self.federation.start().theta.numpy().copy()
        run = reference.start(self.problem, first)
        for done in self.federation.rounds(ROUNDS):
            cohort = {k: self.batches(done.round, k) for k in done.cohort}
            run = reference.next_round(self.problem, run, done.lr, cohort, lost())
            agree(done.state, run)
            yield done.state
        models = [own["model"] for own in run.clients.values() if "model" in own] or [run.theta]
        assert all(np.abs(model - first).max() > 1e-2 for model in models)  # they moved


def agree(state: Any, run: reference.Run) -> None:
    np.testing.assert_allclose(state.theta.numpy(), run.theta, rtol=0, atol=1e-10)
    same(state.server, run.server)
    assert set(state.clients) == set(run.clients)
    for k, expected in run.clients.items():
        same(state.clients[k], expected)


def same(found: Any, expected: reference.State) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].numpy(), value, rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(("method", "weighting"), [(m, by) for m in METHODS for by in weightings(m)])
def test_a_method_equals_numpy(method: str, weighting: str, work: str) -> None:
    assert len(list(Match(method, work=work, weighting=weighting).play())) == ROUNDS


@pytest.mark.parametrize(("method", "objective"), [both for both in product(METHODS, OBJECTIVES) if together(*both)])
def test_a_method_with_an_objective_equals_numpy(method: str, objective: str) -> None:
    assert len(list(Match(method, objective, weighting=weightings(method)[-1]).play())) == ROUNDS


class EverySecond:
    """An engine that loses every second report."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seen = 0
        self.lost: list[set[int]] = []  # per round

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, broadcast: Any, orders: Any, states: Any) -> Iterator[Any]:
        self.lost.append(set())
        for part in self.inner.run(broadcast, orders, states):
            self.seen += 1
            if self.seen % 2:
                yield part
            else:
                self.lost[-1].add(part.reports[0].client)


@pytest.mark.parametrize(
    ("method", "objective"),
    [
        ("feddyn", "cross_entropy"),
        ("feddyn by size", "cross_entropy"),
        ("scaffold", "cross_entropy"),
        ("local_only", "cross_entropy"),
        ("fednova, all", "cross_entropy"),
        ("fedper", "cross_entropy"),
        ("fedrep", "cross_entropy"),
        ("ditto", "contrast"),
        ("fedavg", "contrast"),
        ("feddyn", "contrast"),
        ("scaffold", "contrast"),
    ],
)
def test_lost_reports_leave_no_trace(method: str, objective: str) -> None:
    """The server's c and h also stay the means over all N clients (a client without a state has 0)."""
    match = Match(method, objective)
    match.federation.engine = engine = EverySecond(match.federation.engine)
    weights = match.sizes / match.sizes.mean() if method == "feddyn by size" else np.ones(CLIENTS)
    for state in match.play(lambda: engine.lost[-1]):
        for name in {"c", "h"} & state.server.keys():
            mean = sum(weights[k] * own[name].numpy() for k, own in state.clients.items()) / CLIENTS
            np.testing.assert_allclose(state.server[name].numpy(), mean, rtol=0, atol=1e-12)
    assert [len(lost) for lost in engine.lost] == [1, 2] * (ROUNDS // 2)
