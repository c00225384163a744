"""The inner loop: order of operations, dropout, clipping, batches, and what a client may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conftest import small_federation, steps_of, updated
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import FedAvg, Method
from fedadc.models import Logistic
from fedadc.training.aggregate import received
from fedadc.views.local_work import LocalWork


def federation(work: LocalWork, method: Method | None = None, model: nn.Module | None = None, **kw: Any) -> Federation:
    torch.manual_seed(0)
    model = model or Logistic((5,), 4)
    return Federation(model=model.double(), data=small_federation(), method=method, local=work, **kw)


def update(f: Federation, client: int = 1, round: int = 1) -> Any:
    steps = int(steps_of(f, np.array([client]))[0])
    return updated(f, round, f.agreement.work.lr, f.start().theta, client, steps)


@dataclass(frozen=True, kw_only=True)
class Adds(FedAvg):
    """A method whose correction is a constant."""

    def correct(self, g: Any, theta: Any, local: Any) -> Any:
        return g + 0.25


def test_order_of_operations_in_one_step() -> None:
    """clip the loss gradient, then decay, then the correction, then the step; on paper for one step."""
    f = federation(LocalWork(steps=1, batch_size=100, lr=0.5, clip=0.1, weight_decay=0.2), Adds())
    model, theta = f.model, f.start().theta
    x, y = f.agreement.inputs.gather(f.data.train, f.clients[1])
    g = model.gradient_of(lambda: nn.functional.cross_entropy(model(x), y), theta)[0].clone()
    assert float(g.norm()) > 0.1  # the clip bites
    expected = 0.5 * (g * (0.1 / g.norm()) + 0.2 * theta + 0.25)
    assert torch.allclose(update(f).upload["delta"], expected, atol=1e-14)


def test_clipping_leaves_small_gradients_alone() -> None:
    plain, clipped = (federation(LocalWork(steps=3, batch_size=4, lr=0.1, clip=c)) for c in (None, 1e6))
    assert torch.equal(update(plain).upload["delta"], update(clipped).upload["delta"])


def test_local_momentum_starts_anew_in_every_round() -> None:
    """v = mu v + g from zero: two steps move by lr (g1 + mu g1 + g2); on a constant gradient 2 + mu times lr g."""

    @dataclass(frozen=True, kw_only=True)
    class Constant(FedAvg):
        def correct(self, g: Any, theta: Any, local: Any) -> Any:
            return torch.ones_like(g)

    f = federation(LocalWork(steps=2, batch_size=4, lr=0.1, momentum=0.5), Constant())
    for round in (1, 2):
        delta = update(f, round=round).upload["delta"]
        assert torch.allclose(delta, torch.full_like(delta, 0.1 * 2.5), atol=1e-15)


def test_momentum_of_a_gradient_asked_for_twice_goes_on_from_the_same_v() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice(FedAvg):
        def step(self, theta: Any, grad: Any, local: Any) -> Any:
            grad(theta)
            return super().step(theta, grad, local)

    work = LocalWork(steps=4, batch_size=4, lr=0.1, momentum=0.5)
    assert torch.equal(update(federation(work, Twice())).upload["delta"], update(federation(work)).upload["delta"])


def test_momentum_outlasts_a_step_without_a_gradient() -> None:
    """With momentum 1/2 and gradient 1: v = 1, then a step that stands still, then v = 3/2."""

    @dataclass(frozen=True, kw_only=True)
    class Rests(FedAvg):
        def correct(self, g: Any, theta: Any, local: Any) -> Any:
            return torch.ones_like(g)

        def step(self, theta: Any, grad: Any, local: Any) -> Any:
            return theta if local.step == 1 else super().step(theta, grad, local)

    delta = update(federation(LocalWork(steps=3, batch_size=4, lr=0.1, momentum=0.5), Rests())).upload["delta"]
    assert torch.allclose(delta, torch.full_like(delta, 0.1 * (1 + 1.5)), atol=1e-15)


def test_fewer_steps_than_planned_are_the_first_ones() -> None:
    f = federation(LocalWork(epochs=2, batch_size=4, lr=0.3))
    short = updated(f, 1, 0.3, f.start().theta, 5, 2)
    g = federation(LocalWork(steps=2, batch_size=4, lr=0.3))
    same = updated(g, 1, 0.3, g.start().theta, 5, 2)
    assert torch.equal(short.upload["delta"], same.upload["delta"])


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.body(x), 0.5, self.training))


def test_dropout_is_seeded_per_round_and_client_and_the_global_generator_untouched() -> None:
    f = federation(LocalWork(steps=1, batch_size=100, lr=0.1), model=Noisy())
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = update(f).upload["delta"]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    assert torch.equal(update(f).upload["delta"], first)
    assert not torch.equal(update(f, round=2).upload["delta"], first)


def test_a_clients_update_depends_on_nothing_but_its_order() -> None:
    f = federation(LocalWork(steps=4, batch_size=4, lr=0.3))
    alone = update(f, client=3).upload["delta"]
    for client in (0, 5, 1):
        update(f, client=client)
    assert torch.equal(update(f, client=3).upload["delta"], alone)


def test_report_counts_bytes_and_the_mean_loss() -> None:
    f = federation(LocalWork(epochs=2, batch_size=4, lr=1e-9))
    report = received(f.agreement, update(f, client=2), 3.0).reports[0]
    assert (report.sent, report.weight) == ({"delta": f.model.theta.numel() * 8}, 3.0)
    f = federation(LocalWork(epochs=1, batch_size=100, lr=1e-9))
    x, y = f.agreement.inputs.gather(f.data.train, f.clients[2])
    expected = float(nn.functional.cross_entropy(f.model.predict(f.start().theta, x), y))
    assert update(f, client=2).loss == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "bad",
    [{"steps": 0}, {"epochs": 0}, {"steps": 1, "epochs": 1}, {"batch_size": 0}, {"lr": 0.0}, {"lr": float("nan")},
     {"weight_decay": -1.0}, {"momentum": 1.0}, {"clip": 0.0}],
)  # fmt: skip
def test_impossible_work_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(FedadcError, match=next(iter(bad))):
        LocalWork(**bad)
