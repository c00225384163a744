"""Client drift: its figures against NumPy, the same bits in every engine, and nothing at all where it is off."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import small_federation, updated
from fedadc.communication.network import Communication
from fedadc.communication.uplinks import EightBit, TopK, Uplink
from fedadc.data import from_clients
from fedadc.data.dataset import Array
from fedadc.engines.blocks import grouped
from fedadc.engines.remote import Remote
from fedadc.engines.workers import Workers
from fedadc.evaluation.metrics import Evaluation
from fedadc.federation import Federation
from fedadc.methods import METHODS, FedADC, FedAvg, FedPer, LocalOnly, Method, SlowMo
from fedadc.methods.base import Gradient
from fedadc.models import MLP
from fedadc.models.vectors import State, Vector
from fedadc.system.determinism import deterministic
from fedadc.training.aggregate import BLOCK_LENGTH, OrderedMean, received
from fedadc.training.client import Client
from fedadc.training.drift import UNIT, RoundDrift, drift_of
from fedadc.training.faults import Faults
from fedadc.training.messages import ClientResult, ClientTask
from fedadc.training.rounds import train
from fedadc.training.state import Metrics, Round, RunState
from fedadc.views.local import Local
from fedadc.views.local_work import LocalWork

MEASURED = Evaluation(drift=True)
CLIENTS, COHORT, ROUNDS = 20, 11, 3  # a whole block of 8 and a part of one
NAMES = ("drift_distance", "drift_cosine", "drift_spread", "drift_momentum_cosine")


def federation(method: Method, uplink: Uplink | None = None, double: bool = True, **kw: Any) -> Federation:
    torch.manual_seed(0)
    model = MLP((5,), 4, [6])
    settings: dict[str, Any] = {
        "model": model.double() if double else model,
        "data": small_federation(clients=CLIENTS),
        "local": LocalWork(epochs=1, batch_size=4, lr=0.1),
        "cohort": COHORT,
        "evaluate": MEASURED,
        "communication": Communication(uplink=uplink) if uplink else None,
    }
    return Federation(method=method, **{**settings, **kw})


def drift_in(result: Round) -> Metrics:
    return {name: value for name, value in result.metrics.items() if name.startswith("drift")}


@dataclass(frozen=True, kw_only=True)
class Unwell(FedADC):
    """Some clients have no finite update, others do not move."""

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        samples = len(local.data)
        bad, idle = samples % 5 == 0, samples % 4 == 0
        delta = torch.zeros_like(theta) if idle else local.start - theta
        return {"delta": delta + math.nan if bad else delta}, local.client


# --- the figures, from the single clients' results, in NumPy ---------------------------------------------------------


@deterministic()  # one thread, as in training
def reference(trained: Federation, exact: Federation, before: RunState, result: Round) -> dict[str, float]:
    """The figures of a round from what each counted client returns. `exact` has the same clients and no codec."""
    server = {name: before.server[name] for name in trained.coordinator.downlink}
    sizes, slow = trained.clients.sizes, trained.agreement.work.count_steps(trained.clients.sizes)
    steps = trained.coordinator.faults.draw(
        np.array(sorted(result.cohort)), slow[sorted(result.cohort)], 0, result.round
    )
    h = dict(zip(sorted(result.cohort), steps[2].tolist(), strict=True))
    uploads, moved, weights = [], [], []
    for client in result.cohort:
        if client in (*result.dropped, *result.skipped):
            continue
        common = (result.round, result.lr, before.theta, client, h[client], server, before.clients.get(client))
        upload = updated(trained, *common).upload
        uploads.append(upload["delta"].double().numpy() if upload else None)
        moved.append(own_move(exact, before.theta, updated(exact, *common)))
        weights.append(float(sizes[client]) if trained.coordinator.weighting == "samples" else 1.0)
    found = {"drift_distance": float(np.mean([np.linalg.norm(v) for v in moved]))}
    if uploads[0] is None:
        return found
    return found | of_uploads(uploads, weights, before.server.get("m"))


def own_move(exact: Federation, start: Vector, result: ClientResult) -> Array:
    """Global minus local model."""
    model = result.upload.get("delta", start - result.state["model"] if "model" in result.state else None)
    assert model is not None
    return model.double().numpy()


def of_uploads(uploads: Sequence[Any], weights: Sequence[float], m: Vector | None) -> dict[str, float]:
    found = {}
    directions = [v / np.linalg.norm(v) for v in uploads if np.linalg.norm(v) > 0]
    if len(directions) > 1:
        found["drift_cosine"] = float(np.mean([a @ b for a, b in itertools.combinations(directions, 2)]))
    mean = np.average(uploads, axis=0, weights=weights)
    squares = [np.linalg.norm(v - mean) ** 2 for v in uploads]
    found["drift_spread"] = math.sqrt(np.average(squares, weights=weights))
    if m is not None and bool(m.any()):
        momentum = m.double().numpy()
        found["drift_momentum_cosine"] = mean @ momentum / np.linalg.norm(mean) / np.linalg.norm(momentum)
    return found


CASES: dict[str, tuple[Method, dict[str, Any]]] = {
    **{
        name: (METHODS[name](), {}) for name in ("fedavg", "slowmo", "fedadc", "scaffold", "feddyn", "fedadam", "ditto")
    },
    "nesterov": (FedADC(nesterov=True), {}),
    "weighted": (FedADC(), {"weighting": "samples"}),
    "weighted scaffold": (METHODS["scaffold"](), {"weighting": "samples"}),
    "a part of theta": (FedPer(), {"weighting": "samples"}),
    "no upload": (LocalOnly(), {}),
    "top_k": (FedADC(), {"uplink": TopK(share=0.2, error_feedback=False)}),
    "eight_bit of a part": (FedPer(), {"uplink": EightBit(block=8), "weighting": "samples"}),
    "faults": (SlowMo(), {"faults": Faults(drop=0.3, slow=0.3), "weighting": "samples"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_figures_are_those_of_numpy(name: str) -> None:
    method, kw = CASES[name]
    check_against_numpy(method, 1e-10, 1e-12, **kw)


@pytest.mark.parametrize("name", ["fedadc", "weighted", "eight_bit of a part", "faults"])
def test_single_precision_costs_seven_digits_of_the_sums(name: str) -> None:
    """The mean and the sum of unit uploads have the model's 24 bits; norms and what follows are float64."""
    method, kw = CASES[name]
    check_against_numpy(method, 1e-6, 1e-6, double=False, **kw)


def check_against_numpy(method: Method, rel: float, least: float, **kw: Any) -> None:
    trained, exact = federation(method, **kw), federation(method, **{**kw, "uplink": None})
    before = trained.start()
    for result in trained.rounds(ROUNDS):
        expected = reference(trained, exact, before, result)
        assert drift_in(result) == pytest.approx(expected, rel=rel, abs=least)
        assert result.metrics.keys() & set(NAMES) == expected.keys()
        before = result.state
    with_momentum = "m" in trained.start().server
    assert ("drift_momentum_cosine" in expected) == with_momentum
    assert set(expected) == ({NAMES[0]} if not method.federated else set(NAMES[: 3 + with_momentum]))


def test_clients_that_stand_still_or_are_not_finite() -> None:
    """Those that stand still have no direction, but count in the distance and the spread; the others count nowhere."""
    trained, moving = (federation(m, weighting="samples", cohort=CLIENTS) for m in (Unwell(), FedADC()))
    before = trained.start()
    sizes = trained.clients.sizes
    for result in trained.rounds(ROUNDS):
        assert set(result.skipped) == set(np.flatnonzero(sizes % 5 == 0).tolist())
        expected = reference(trained, moving, before, result)  # Unwell's uploads do not tell where local models are
        counted = [k for k in result.cohort if k not in result.skipped]
        still = [k for k in counted if sizes[k] % 4 == 0]
        assert len(still) >= 2 and len(counted) - len(still) >= 2
        assert drift_in(result) == pytest.approx(expected, rel=1e-10)
        before = result.state


class Still(FedADC):
    def step(self, theta: Vector, grad: Gradient, local: Local) -> Vector:
        return theta


def test_nobody_moves() -> None:
    for result in federation(Still()).rounds(2):
        assert drift_in(result) == {"drift_distance": 0.0, "drift_spread": 0.0}


def test_one_client_alone_has_no_pair() -> None:
    first, second = federation(SlowMo(), cohort=1).rounds(2)
    assert drift_in(first).keys() == {"drift_distance", "drift_spread"} and first.metrics["drift_spread"] == 0
    assert drift_in(second).keys() == {"drift_distance", "drift_spread", "drift_momentum_cosine"}


def test_a_round_in_which_nobody_reports_has_no_drift() -> None:
    rounds = list(federation(FedADC(), faults=Faults(drop=1.0)).rounds(2))
    assert all(not drift_in(r) and len(r.dropped) == COHORT for r in rounds)


def test_drift_is_measured_in_every_round_and_evaluation_where_it_is_due() -> None:
    rounds = list(federation(FedAvg(), evaluate=Evaluation(every=2, drift=True)).rounds(3))
    assert [len(drift_in(r)) for r in rounds] == [3, 3, 3]
    assert ["test_accuracy" in r.metrics for r in rounds] == [False, True, True]


# --- properties ------------------------------------------------------------------------------------------------------


AGREEMENT = federation(FedAvg()).agreement


@deterministic()
def figures(uploads: Sequence[Vector], weights: Sequence[float] = (), momentum: Vector | None = None) -> Metrics:
    """The drift of these uploads, as a round computes it."""
    mean, drift = OrderedMean(), RoundDrift()
    for k, (delta, weight) in enumerate(itertools.zip_longest(uploads, weights, fillvalue=1.0)):
        part = received(AGREEMENT, ClientResult(k, {"delta": delta}, {}, 0.0, distance=1.0), weight)
        mean.add(part)
        assert part.reports[0].drift is not None
        drift.add(part.reports[0].drift, weight)
    return drift.metrics(mean.result(), mean.unit_sum, momentum)


def vectors(count: int, seed: int = 0) -> list[Vector]:
    return list(torch.randn(count, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


@given(st.integers(2, 30), st.integers(0, 100), st.floats(1e-30, 1e30))
def test_opposite_and_equal_uploads(many: int, seed: int, scale: float) -> None:
    (v,) = vectors(1, seed)
    assert figures([v, -scale * v])["drift_cosine"] == pytest.approx(-1, abs=1e-12)
    equal = figures([v] * many, momentum=-v)
    assert equal["drift_cosine"] == pytest.approx(1, abs=1e-12)
    assert equal["drift_momentum_cosine"] == pytest.approx(-1, abs=1e-12)
    assert equal["drift_spread"] == pytest.approx(0, abs=1e-6 * float(v.norm()))  # the root of a rounding error


@given(st.integers(2, 20), st.integers(0, 100), st.data())
def test_the_cosine_knows_directions_only_and_the_spread_scales(many: int, seed: int, data: st.DataObject) -> None:
    some = vectors(many, seed)
    before = figures(some)
    at, scale = data.draw(st.integers(0, many - 1)), data.draw(st.floats(1e-20, 1e20))
    one = [scale * v if k == at else v for k, v in enumerate(some)]
    assert figures(one)["drift_cosine"] == pytest.approx(before["drift_cosine"], abs=1e-12)
    every = figures([scale * v for v in some])
    assert every["drift_cosine"] == pytest.approx(before["drift_cosine"], abs=1e-12)
    assert every["drift_spread"] == pytest.approx(scale * float(str(before["drift_spread"])), rel=1e-10)


@given(st.integers(1, 20), st.integers(0, 100))
def test_what_all_clients_share_is_in_the_distance_and_not_in_the_spread(many: int, seed: int) -> None:
    some, (shared,) = vectors(many, seed), vectors(1, seed + 1000)
    weights = [1.0 + k for k in range(many)]
    apart, together = figures(some, weights), figures([v + shared for v in some], weights)
    assert together["drift_spread"] == pytest.approx(apart["drift_spread"], rel=1e-9, abs=1e-6)


def test_clients_with_the_same_samples_do_not_drift_apart() -> None:
    """Whole batches, so that only the order of the samples differs, and with it the rounding."""
    rng = np.random.default_rng(0)
    share = (torch.from_numpy(rng.normal(size=(12, 5))), torch.arange(12) % 4)
    data = from_clients([share] * 9, share)
    work = LocalWork(steps=3, batch_size=12, lr=0.1)
    for result in federation(FedADC(), data=data, local=work, cohort=9).rounds(3):
        assert result.metrics["drift_cosine"] == pytest.approx(1, abs=1e-12)
        assert 0 <= float(str(result.metrics["drift_spread"])) < 1e-6 * float(str(result.metrics["drift_distance"]))


def test_half_precision_is_summed_in_single() -> None:
    delta = torch.full((4096,), 0.5).half()
    drift, unit = drift_of(1.0, {"delta": delta})
    assert drift.norm == 32 and unit[UNIT].dtype == torch.float32 and float(unit[UNIT].norm()) == pytest.approx(1)


# --- every engine ----------------------------------------------------------------------------------------------------

SAME_BITS: dict[str, tuple[Method, dict[str, Any]]] = {
    "uniform": (FedADC(), {}),
    "weighted, compressed": (SlowMo(), {"weighting": "samples", "uplink": EightBit(block=8)}),
    "faults": (FedAvg(), {"weighting": "samples", "faults": Faults(drop=0.2, slow=0.3)}),
    "not finite": (Unwell(), {"weighting": "samples"}),
    "with states": (METHODS["scaffold"](), {"weighting": "samples", "uplink": TopK(share=0.2)}),
}


@pytest.mark.parametrize("name", SAME_BITS)
def test_any_number_of_workers_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, kw = SAME_BITS[name]
    kw = {"data": small_federation(clients=48), "cohort": 44, "local": LocalWork(steps=3, batch_size=4, lr=0.1), **kw}
    parcels: list[Any] = []
    original = Workers._partial_sum
    monkeypatch.setattr(Workers, "_partial_sum", lambda s, answer: (parcels.append(answer), original(s, answer))[1])

    def outcome(workers: int) -> list[Any]:
        trained = federation(method, workers=workers, double=False, **kw)
        rounds = list(trained.rounds(2))
        trained.close()
        return [(r.metrics, r.train_loss, r.state.theta.tolist(), r.skipped, r.dropped) for r in rounds]

    alone = outcome(0)
    assert len(alone[0][0]) >= 4 and not parcels
    for workers in (1, 2, 3):
        assert outcome(workers) == alone
    assert not any(isinstance(answer.sum, bytes) for answer in parcels)  # the sum of unit uploads has room in a slot
    blocks = [answer for answer in parcels if len(answer.facts) == BLOCK_LENGTH]
    assert blocks or name == "with states"
    assert len(list(grouped([ClientTask(k, 3) for k in range(44)], 3))) < 44


@pytest.mark.parametrize("name", SAME_BITS)
def test_clients_that_pass_bytes_give_the_same_bits_also_where_answers_are_lost(name: str) -> None:
    """As if the lost clients had been dropped."""
    method, kw = SAME_BITS[name]
    trained = federation(method, double=False, **kw)
    clients = {k: Client(trained.agreement, k, trained.data.train.take(trained.clients[k])) for k in range(CLIENTS)}
    lost = {trained.coordinator.select(1).tolist()[2], trained.coordinator.select(2).tolist()[5]}

    def exchange(messages: Sequence[tuple[int, bytes]]) -> Iterator[bytes | None]:
        for client, message in messages:
            yield None if client in lost else clients[client].answer(message)

    def heard(broadcast: Any, tasks: Any, states: Any) -> Any:
        return trained.engine.run(broadcast, [task for task in tasks if task.client not in lost], states)

    apart = list(train(trained.coordinator, Remote(trained.agreement, exchange).run, ROUNDS, trained.start()))
    here = list(train(trained.coordinator, heard, ROUNDS, trained.start()))
    assert lost & set(apart[0].dropped) and [r.metrics for r in apart] == [r.metrics for r in here]
    assert len(here[-1].metrics) >= 3


# --- off -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [FedADC(), METHODS["scaffold"](), FedPer(), LocalOnly()], ids=lambda m: type(m).__name__
)
def test_measuring_drift_changes_nothing_else(method: Method) -> None:
    on, off = federation(method), federation(method, evaluate=Evaluation())
    for a, b in zip(on.rounds(ROUNDS), off.rounds(ROUNDS), strict=True):
        assert drift_in(a) and not drift_in(b)
        assert {k: v for k, v in a.metrics.items() if k not in drift_in(a)} == b.metrics
        assert torch.equal(a.state.theta, b.state.theta) and a.state.server.keys() == b.state.server.keys()
        assert all(torch.equal(v, b.state.server[k]) for k, v in a.state.server.items())
        assert (a.train_loss, a.ledger) == (b.train_loss, b.ledger)  # the ledger counts vectors


def test_off_measures_and_adds_nothing() -> None:
    trained = federation(FedADC(), evaluate=Evaluation())
    result = updated(trained, 1, 0.1, trained.agreement.start, 0, 2, trained.start().server)
    part = received(trained.agreement, result, 1.0)
    assert math.isnan(result.distance) and part.reports[0].drift is None and part.sum.keys() == {"delta"}
