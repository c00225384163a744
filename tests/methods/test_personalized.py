"""Personalized methods: what clients' own models must equal, in float64, and which parts are never sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from conftest import small_federation, steps_of, updated
from family import OBJECTIVES_OF_CLASSES
from fedadc.data import from_clients
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import METHODS, Ditto, FedAvg, FedBABU, FedPer, FedRep, LocalOnly, Method
from fedadc.models import MLP, Logistic
from fedadc.objectives import CrossEntropy, ModelContrast
from fedadc.partitions import Pooled
from fedadc.schedules import Cosine
from fedadc.training.messages import ClientResult
from fedadc.training.state import Round
from fedadc.views.local_work import LocalWork

# The clip is small, so gradients are often clipped, and the part whose norm is taken matters.
WORK = LocalWork(epochs=2, batch_size=4, lr=0.2, weight_decay=0.05, clip=0.5, schedule=Cosine(final=0.2))
MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.6])
SENDING_BODIES = [name for name, cls in METHODS.items() if cls.travels == "embed"]


def network() -> MLP:
    torch.manual_seed(0)
    return MLP((5,), 4, hidden=[7], projection=3).double()


def federation(method: Method, work: LocalWork = WORK, model: Any = None, data: Any = None, **kw: Any) -> Federation:
    settings: dict[str, Any] = {"cohort": 3, "seed": 5, "test": 0, **kw}
    return Federation(model=model or network(), data=data or small_federation(), method=method, local=work, **settings)


def run(*args: Any, **kw: Any) -> list[Round]:
    return list(federation(*args, **kw).rounds(5))


def own_models(method: Method, done: Round) -> dict[int, torch.Tensor]:
    return {k: method.personal(done.state.theta, own) for k, own in done.state.clients.items()}


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0, atol=1e-10)


@dataclass(frozen=True, kw_only=True)
class ByAutograd(CrossEntropy):
    """Cross-entropy without its closed form, which models with frozen parts do not have."""

    def __call__(self, model: Any, batch: Any, local: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model.module(batch.x), batch.y)


@MOMENTA
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_fedbabu_is_fedavg_with_a_frozen_head(momentum: float, weighting: str) -> None:
    """Bit for bit: clip, weight decay and momentum also apply to the body only."""
    frozen = network()
    frozen.head.requires_grad_(False)
    work, objective = replace(WORK, momentum=momentum), ByAutograd()
    ours = run(FedBABU(objective=objective), work, weighting=weighting)
    theirs = run(FedAvg(objective=objective), work, model=frozen, weighting=weighting)
    start = federation(FedBABU()).start().theta
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.state.theta, torch.cat([b.state.theta, start[len(b.state.theta) :]]))
        assert (a.train_loss, a.metrics) == (b.train_loss, b.metrics)
    assert len(theirs[0].state.theta) < len(start)


@MOMENTA
def test_fedrep_without_steps_of_the_head_is_fedbabu(momentum: float) -> None:
    work = replace(WORK, momentum=momentum)
    body = slice(0, network_cut())
    for a, b in zip(run(FedRep(head_share=0), work), run(FedBABU(), work), strict=True):
        assert torch.equal(a.state.theta, b.state.theta) and a.train_loss == b.train_loss
        for model in own_models(FedRep(), a).values():
            assert torch.equal(model[body], b.state.theta[body])
            assert torch.equal(model, b.state.theta)


def network_cut() -> int:
    return int(federation(FedAvg()).model.part("embed").stop)


@MOMENTA
def test_fedper_with_one_client_is_fedavg(momentum: float) -> None:
    alone: dict[str, Any] = {"partition": Pooled(), "cohort": None}
    work = replace(WORK, momentum=momentum)
    for a, b in zip(run(FedPer(), work, **alone), run(FedAvg(), work, **alone), strict=True):
        assert_equal(own_models(FedPer(), a)[0], b.state.theta)


@MOMENTA
def test_fedper_of_clients_with_the_same_data_is_fedavg(momentum: float) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 5)), rng.integers(4, size=12)
    alike: dict[str, Any] = {"data": from_clients([(x, y)] * 4), "cohort": None}
    work = replace(WORK, batch_size=12, momentum=momentum)
    for a, b in zip(run(FedPer(), work, **alike), run(FedAvg(), work, **alike), strict=True):
        for model in own_models(FedPer(), a).values():
            assert_equal(model, b.state.theta)


def test_fedper_of_clients_with_different_data_is_not_fedavg() -> None:
    ours, fedavg = run(FedPer())[-1], run(FedAvg())[-1]
    body = slice(0, network_cut())
    assert float((ours.state.theta - fedavg.state.theta)[body].abs().max()) > 1e-3


@pytest.mark.parametrize("lam", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("objective", OBJECTIVES_OF_CLASSES)
def test_dittos_global_model_is_fedavgs(objective: str, lam: float) -> None:
    """Bit for bit, and so is the reported loss."""
    loss = OBJECTIVES_OF_CLASSES[objective]()
    for a, b in zip(run(Ditto(lam=lam, objective=loss)), run(FedAvg(objective=loss)), strict=True):
        assert torch.equal(a.state.theta, b.state.theta) and a.train_loss == b.train_loss
        assert a.metrics.items() >= b.metrics.items()


def test_ditto_without_a_pull_is_local_only() -> None:
    """All clients are selected in every round, so that all start from the same model."""
    for a, b in zip(run(Ditto(lam=0), cohort=None), run(LocalOnly(), cohort=None), strict=True):
        for k, own in b.state.clients.items():
            assert torch.equal(a.state.clients[k]["model"], own["model"])
    assert float((a.state.clients[0]["model"] - a.state.theta).abs().max()) > 1e-2


def test_a_strong_pull_keeps_dittos_own_models_near_the_global_one() -> None:
    """At lr · lam = 1 a step leads to theta_t - lr g, and the clip bounds g."""
    made = federation(Ditto(lam=5), LocalWork(epochs=2, batch_size=4, lr=0.2, clip=0.5), cohort=None)
    sent = made.start().theta
    for done in made.rounds(5):
        for own in done.state.clients.values():
            assert 1e-3 < float((own["model"] - sent).norm()) <= 0.2 * 0.5 * (1 + 1e-12)
        sent = done.state.theta


def reports(method: Method, work: LocalWork = WORK, **kw: Any) -> tuple[Federation, list[ClientResult]]:
    """All clients' reports of a second round, after one in which half of them took part."""
    made = federation(method, work, **kw)
    state = next(made.rounds(1)).state
    sent = {name: state.server[name] for name in made.coordinator.downlink}
    steps = steps_of(made, np.arange(len(made.clients))).tolist()
    return made, [updated(made, 2, 0.2, state.theta, k, h, sent, state.clients.get(k)) for k, h in enumerate(steps)]


def test_the_body_is_the_mean_of_the_clients_bodies() -> None:
    made = federation(FedPer(), cohort=None)
    before = made.start()
    for done in made.rounds(4):
        steps = steps_of(made, np.arange(6)).tolist()
        ends = []
        for k, h in enumerate(steps):
            report = updated(made, done.round, done.lr, before.theta, k, h, state=before.clients.get(k))
            ends.append(FedPer().personal(before.theta - report.upload["delta"], report.state))
            assert torch.equal(report.state["head"], done.state.clients[k]["head"])
        body = slice(0, network_cut())
        assert_equal(done.state.theta[body], torch.stack(ends).mean(dim=0)[body])
        before = done.state


@pytest.mark.parametrize(("name", "objective"), list(product(SENDING_BODIES, ["cross_entropy", "restricted_softmax"])))
@MOMENTA
def test_heads_never_leave_their_clients(name: str, objective: str, momentum: float) -> None:
    method, work = METHODS[name](objective=OBJECTIVES_OF_CLASSES[objective]()), replace(WORK, momentum=momentum)
    made, found = reports(method, work, weighting="samples")
    head, start = made.model.part("head"), made.start().theta
    for report in found:
        assert set(report.upload) == {"delta"}
        assert not report.upload["delta"][head].any() and report.upload["delta"].any()
    for done in made.rounds(4):
        assert torch.equal(done.state.theta[head], start[head])


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_a_client_keeps_no_more_than_a_head(name: str) -> None:
    made, found = reports(METHODS[name]())
    size = len(made.start().theta[made.model.part("head")])
    assert {report.state["head"].numel() for report in found} == {size}
    assert len({tuple(report.state["head"].tolist()) for report in found}) == len(found)


@dataclass(frozen=True, kw_only=True)
class Watched(FedRep):
    """FedRep that records theta before every step."""

    seen: list[torch.Tensor] = field(default_factory=list)

    def step(self, theta: Any, grad: Any, local: Any) -> Any:
        self.seen.append(theta.clone())
        return super().step(theta, grad, local)


@MOMENTA
@pytest.mark.parametrize(("share", "steps", "heads"), [(0.9, 10, 9), (0.9, 2, 1), (0.5, 5, 2), (0.99, 3, 2), (0, 3, 0)])
def test_fedrep_trains_the_head_and_then_the_body(share: float, steps: int, heads: int, momentum: float) -> None:
    method = Watched(head_share=share)
    work = LocalWork(steps=steps, batch_size=4, lr=0.2, momentum=momentum, weight_decay=0.05)
    made = federation(method, work)
    report = updated(made, 1, 0.2, made.start().theta, 2, steps)
    end = method.personal(made.start().theta - report.upload["delta"], report.state)
    head, body = made.model.part("head"), made.model.part("embed")
    moved = [
        ((b - a)[head].any(), (b - a)[body].any()) for a, b in zip(method.seen, [*method.seen[1:], end], strict=True)
    ]
    assert moved == [(True, False)] * heads + [(False, True)] * (steps - heads)


@pytest.mark.parametrize("name", SENDING_BODIES)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (torch.nn.Sequential(torch.nn.Linear(5, 4)), "Sequential has no split into `embed` and `head`"),
        (Logistic((5,), 4), "Logistic has no parameters before its head"),
    ],
)
def test_a_model_without_a_body_or_a_head_is_refused(name: str, model: torch.nn.Module, words: str) -> None:
    with pytest.raises(FedadcError, match=words):
        federation(METHODS[name](), model=model.double())


def test_settings_out_of_range_are_refused() -> None:
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(FedadcError, match=r"head_share must be in \[0, 1\)"):
            FedRep(head_share=share)
    for lam in (-0.1, float("inf"), float("nan")):
        with pytest.raises(FedadcError, match="lam must be at least 0"):
            Ditto(lam=lam)


def test_an_objectives_own_state_follows_dittos_global_model() -> None:
    """MOON's previous model is the one that was uploaded, as in FedAvg with MOON."""
    ditto, fedavg = (run(make(objective=ModelContrast()))[-1].state.clients for make in (Ditto, FedAvg))
    assert all(torch.equal(ditto[k]["previous"], own["previous"]) for k, own in fedavg.items())


def test_fedrep_warns_where_heads_would_never_be_trained(caplog: pytest.LogCaptureFixture) -> None:
    """The only step of a round trains the body."""
    settings: dict[str, Any] = {"model": MLP((5,), 4, [6]), "data": small_federation(), "method": FedRep()}
    with pytest.raises(FedadcError, match="no head would ever be trained"):
        Federation(**settings, local=LocalWork(steps=1, batch_size=4, lr=0.1))
    Federation(**settings, local=LocalWork(epochs=1, batch_size=10, lr=0.1))
    assert "2 clients do one local step per round" in caplog.text
    Federation(**{**settings, "method": FedRep(head_share=0)}, local=LocalWork(steps=1, batch_size=4, lr=0.1))
