"""What every method with every objective must do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from conftest import small_federation
from fedadc.config import load_config
from fedadc.data.batches import Augment
from fedadc.federation.federation import Federation
from fedadc.federation.local import LocalWork, Order, local_update
from fedadc.methods import METHODS, Method
from fedadc.models import MLP
from fedadc.objectives import OBJECTIVES
from fedadc.plan import prepare
from fedadc.runner import run

PAIRS = list(product(METHODS, OBJECTIVES))
CONFIG: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "digits", "clients": 20, "partition": {"name": "sort", "labels_per_client": 2}},
    "model": {"name": "mlp", "hidden": [16]},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.1},
    "cohort": {"size": 5},
}


@pytest.mark.parametrize(("method", "objective"), PAIRS)
def test_runs_on_digits_finite_deterministic_and_counted(method: str, objective: str) -> None:
    config = load_config({**CONFIG, "method": method, "objective": objective})
    first, second = run(config), run(config)
    assert torch.isfinite(first.state.theta).all()
    assert torch.equal(first.state.theta, second.state.theta)
    for a, b in zip(first.history, second.history, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    size = first.state.theta.numel() * 4
    sent = 1 + len({*METHODS[method].downlink, *OBJECTIVES[objective].downlink})
    assert {r["bytes_up"] for r in first.history} == {5 * size}
    assert {r["bytes_down"] for r in first.history} == {5 * size * sent}
    assert load_config(prepare(config).config.tree()).method == config.method


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(("method", "objective"), PAIRS)
def test_keeps_its_hands_off_what_it_does_not_own(method: str, objective: str, momentum: float) -> None:
    """A returned gradient is lost at the next call (here: NaN), and start, server and client are never written."""
    cls: type[Method] = METHODS[method]
    momentum = 0.0 if method == "fedadc_double" else momentum

    class Poisoned(cls):  # type: ignore[misc, valid-type]
        def step(self, theta: Any, grad: Any, local: Any) -> Any:
            def poisoning(point: Any) -> Any:
                if "last" in local.scratch:
                    local.scratch["last"].fill_(float("nan"))
                local.scratch["last"] = grad(point)
                return local.scratch["last"]

            return super().step(theta, poisoning, local)

    torch.manual_seed(0)
    module = MLP((5,), 4, [6]).double()
    work = LocalWork(steps=4, batch_size=4, lr=0.1, momentum=momentum, weight_decay=0.01)
    uploads = []
    for kind in (cls, Poisoned):
        federation = Federation(
            model=module, data=small_federation(), method=kind(objective=OBJECTIVES[objective]()), local=work
        )
        state = federation.start()
        server = {name: torch.randn(state.theta.shape, generator=torch.Generator().manual_seed(1)).double()
                  for name in cls.downlink}  # fmt: skip
        order = Order(1, 3, 0.1, state.theta.clone(), server, cls().client_state(state.theta))
        before = {"theta": order.theta.clone(), **{k: v.clone() for k, v in (order.server | order.state).items()}}
        report = local_update(federation.workplace, order)
        for name, vector in {"theta": order.theta, **order.server, **order.state}.items():
            assert torch.equal(vector, before[name]), name
        uploads.append(report.upload)
    for name, vector in uploads[0].items():
        assert torch.isfinite(vector).all()
        assert torch.equal(vector, uploads[1][name]), name


@pytest.mark.parametrize("method", METHODS)
def test_settings_out_of_range_are_refused(method: str) -> None:
    from fedadc.errors import FedadcError

    for name in set(METHODS[method].__dataclass_fields__) & {"beta", "beta_local", "phi"}:
        for bad in (-0.1, 1.0, float("nan")):
            with pytest.raises(FedadcError, match=name):
                METHODS[method](**{name: bad})
    if "server_lr" in METHODS[method].__dataclass_fields__:
        with pytest.raises(FedadcError, match="server_lr"):
            METHODS[method](server_lr=0.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("objective", [o for o in OBJECTIVES if o != "cross_entropy"])
def test_augmentation_changes_the_teacher_path_but_not_determinism(objective: str) -> None:
    config = load_config({**CONFIG, "method": "fedadc", "objective": objective})
    augmented = replace(config, data=replace(config.data, augment=Augment(crop=1, flip=True)))
    first, second = run(augmented), run(augmented)
    assert torch.equal(first.state.theta, second.state.theta)
    assert not torch.equal(first.state.theta, run(config).state.theta)
