"""Clients that fail: dropped, slow, not finite. What a round without them is, for every method and any engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import small_federation, steps_of, updated
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import METHODS, FedADC, FedAvg, FedDyn, LocalOnly, Method, Scaffold
from fedadc.models import MLP
from fedadc.training.aggregate import BLOCK_LENGTH
from fedadc.training.faults import Faults, all_finite
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.state import Round
from fedadc.views.local_work import LocalWork

HALF = Faults(drop=0.5)
CLIENTS = 20


def federation(method: Method, faults: Faults | None = None, **kw: Any) -> Federation:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "model": MLP((5,), 4, [6], projection=3).double(),
        "data": small_federation(clients=CLIENTS),
        "local": LocalWork(epochs=1, batch_size=4, lr=0.1),
        "cohort": 8,
    }
    return Federation(method=method, faults=faults, **{**settings, **kw})


def finished(trained: Federation, rounds: int) -> list[Round]:
    found = list(trained.rounds(rounds))
    trained.close()
    return found


# --- who fails -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000), st.integers(1, 500))
def test_shares_of_any_cohort(many: int, drop: float, part: float, seed: int, round: int) -> None:
    slow = part * (1 - drop)
    cohort, steps = np.arange(many) * 3, np.arange(many) % 5 + 2
    dropped, late, done = Faults(drop=drop, slow=slow).draw(cohort, steps, seed, round)
    assert abs(dropped.sum() - drop * many) < 1 and abs(late.sum() - slow * many) <= 1
    assert not (dropped & late).any()
    assert np.array_equal(done[~late], steps[~late])
    assert ((done[late] >= 1) & (done[late] < steps[late])).all()


def test_the_shares_are_right_on_average_and_everybody_is_struck_alike() -> None:
    """7 clients, 0.3 and 0.2 of them: 2.1 and 1.4 a round (standard errors 0.007 and 0.011 over 2,000 rounds)."""
    cohort, steps, faults = np.arange(7), np.full(7, 9), Faults(drop=0.3, slow=0.2)
    struck = [faults.draw(cohort, steps, 0, t) for t in range(1, 2001)]
    dropped, late = (np.array([s[i] for s in struck]) for i in (0, 1))
    assert abs(dropped.sum(axis=1).mean() - 2.1) < 0.03 and abs(late.sum(axis=1).mean() - 1.4) < 0.05
    assert np.abs(dropped.mean(axis=0) - 0.3).max() < 0.05 and np.abs(late.mean(axis=0) - 0.2).max() < 0.05
    h = Counter(int(v) for s in struck for v in s[2][s[1]])
    assert sorted(h) == list(range(1, 9)) and max(h.values()) < 1.3 * min(h.values())  # uniform on 1 ... H - 1


def test_nobody_does_less_than_one_step() -> None:
    dropped, late, done = Faults(slow=1.0).draw(np.arange(4), np.array([1, 2, 1, 2]), 0, 1)
    assert not dropped.any() and late.tolist() == [False, True, False, True] and done.tolist() == [1, 1, 1, 1]


def test_a_larger_share_drops_the_same_clients_and_more() -> None:
    cohort, steps = np.arange(30), np.full(30, 4)
    for t in range(1, 20):
        few, many = (Faults(drop=share).draw(cohort, steps, 3, t)[0] for share in (0.2, 0.6))
        assert (few <= many).all() and few.sum() < many.sum()


def test_every_method_meets_the_same_faults() -> None:
    faults = Faults(drop=0.3, slow=0.4)
    runs = [finished(federation(METHODS[name](), faults), 4) for name in ("fedavg", "fedadc", "scaffold")]
    faults_of = [[(r.cohort, r.dropped, r.slow) for r in rounds] for rounds in runs]
    assert faults_of[0] == faults_of[1] == faults_of[2] and any(r.dropped and r.slow for r in runs[0])


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"drop": 1.1}, r"^drop must"), ({"slow": -0.1}, r"^slow must"), ({"drop": 0.6, "slow": 0.6}, "at most 1"),
     ({"bad_update": "ignore"}, "'skip' or 'stop'"), ({"drop": float("nan")}, r"^drop must")],
)  # fmt: skip
def test_impossible_faults_are_refused(settings: Any, word: str) -> None:
    with pytest.raises(FedadcError, match=word):
        Faults(**settings)


# --- dropped clients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "name"), [(Scaffold(server_lr=0.8), "c"), (FedDyn(alpha=0.3), "h")])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_servers_vector_is_the_mean_over_all_clients_with_half_of_them_dropped(
    method: Method, name: str, workers: int
) -> None:
    for done in finished(federation(method, Faults(drop=0.5, slow=0.25), workers=workers), 6):
        total = sum(own[name].numpy() for own in done.state.clients.values())
        np.testing.assert_allclose(done.state.server[name].numpy(), total / CLIENTS, rtol=0, atol=1e-13)
        assert len(done.dropped) == 4 and np.abs(total).max() > 1e-3


def test_dropped_clients_take_no_part_and_keep_their_states() -> None:
    before: dict[int, torch.Tensor] = {}
    for done in finished(federation(FedDyn(), HALF), 5):
        reported = set(done.cohort) - set(done.dropped)
        assert len(done.dropped) == len(reported) == 4
        for client, state in done.state.clients.items():
            assert (client in reported) or torch.equal(state["h"], before[client])
        assert reported <= set(done.state.clients)
        before = {k: s["h"].clone() for k, s in done.state.clients.items()}


def test_a_round_with_dropped_clients_is_a_round_of_the_others() -> None:
    """FedAvg by hand: the mean of the reporting clients' deltas."""
    trained = federation(FedAvg(), HALF)
    first = next(trained.rounds(1))
    alone = federation(FedAvg())
    start = alone.start()
    reported = [k for k in first.cohort if k not in first.dropped]
    steps = dict(zip(reported, steps_of(alone, np.array(reported)).tolist(), strict=True))
    deltas = [updated(alone, 1, 0.1, start.theta, k, steps[k]).upload["delta"] for k in reported]
    assert torch.allclose(first.state.theta, start.theta - torch.stack(deltas).mean(dim=0), atol=1e-15)
    assert first.bytes_up == 4 * start.theta.numel() * 8 and first.bytes_down == 8 * start.theta.numel() * 8


@pytest.mark.parametrize("name", METHODS)
def test_a_round_without_reports_changes_nothing(name: str) -> None:
    trained = federation(METHODS[name](), Faults(drop=1.0))
    start, rounds = trained.start(), finished(trained, 2)
    for done in rounds:
        assert set(done.dropped) == set(done.cohort) and np.isnan(done.train_loss)
        assert torch.equal(done.state.theta, start.theta) and not done.state.clients
        assert done.state.server.keys() == start.server.keys()
        assert all(torch.equal(v, start.server[k]) for k, v in done.state.server.items())


# --- slow clients ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecordsSteps(FedAvg):
    """Keeps the number of steps that a client is given at its first step, and the number that it does."""

    def client_state(self, theta: Any) -> Any:
        return {"steps": torch.zeros(2)}

    def step(self, theta: Any, grad: Any, local: Any) -> Any:
        local.scratch.setdefault("given", torch.tensor(float(local.steps)))
        local.scratch["done"] = torch.tensor(local.step + 1.0)
        return super().step(theta, grad, local)

    def finish(self, theta: Any, local: Any) -> Any:
        steps = torch.stack([local.scratch["given"], local.scratch["done"]])
        return super().finish(theta, local)[0], {"steps": steps}


def test_a_slow_client_knows_its_own_h_from_the_first_step() -> None:
    work, seen = LocalWork(steps=7, batch_size=3, lr=0.1), 0
    for done in finished(federation(RecordsSteps(), Faults(slow=0.5), local=work), 4):
        for client in done.cohort:
            given, did = done.state.clients[client]["steps"].tolist()
            assert given == did and (given < 7) == (client in done.slow)
            seen += client in done.slow
    assert seen == 16


def test_a_slow_clients_batches_are_the_first_of_its_whole_round() -> None:
    """Its result is that of a client with fewer steps, not with other data."""
    trained = federation(FedAvg(), Faults(slow=1.0), local=LocalWork(steps=7, batch_size=3, lr=0.1), cohort=1)
    first = next(trained.rounds(1))
    (client,) = first.cohort
    h = int(Faults(slow=1.0).draw(np.array([client]), np.array([7]), 0, 1)[2][0])
    report = updated(trained, 1, 0.1, trained.start().theta, client, h)
    assert torch.equal(first.state.theta, trained.start().theta - report.upload["delta"])


# --- updates that are not finite -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spoils(FedDyn):
    """Some clients' updates are not finite, in the upload or only in what they keep."""

    which: tuple[int, ...] = (3, 9)
    value: float = float("nan")
    where: str = "upload"

    def finish(self, theta: Any, local: Any) -> Any:
        upload, state = super().finish(theta, local)
        bad = upload["delta"] if self.where == "upload" else state["h"]
        if (len(local.data) - 7) // 3 in self.which:
            bad[-1] = self.value
        return upload, state


@pytest.mark.parametrize("where", ["upload", "state"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("workers", [0, 3])
def test_a_client_whose_update_is_not_finite_is_left_out(where: str, value: float, workers: int) -> None:
    skipped = 0
    for done in finished(federation(Spoils(value=value, where=where), workers=workers, cohort=None), 3):
        assert set(done.skipped) == {3, 9} and np.isfinite(done.train_loss)
        assert not {3, 9} & set(done.state.clients) and len(done.state.clients) == CLIENTS - 2
        total = sum(own["h"] for own in done.state.clients.values())
        assert torch.allclose(done.state.server["h"], total / CLIENTS, atol=1e-14)
        assert all_finite({"theta": done.state.theta, **done.state.server})
        skipped += len(done.skipped)
    assert skipped == 6


@dataclass(frozen=True, kw_only=True)
class SpoilsBlocks(FedAvg):
    """Without states, so that workers add whole blocks ahead; one whole block of the cohort is bad."""

    which: tuple[int, ...] = ()

    def finish(self, theta: Any, local: Any) -> Any:
        upload, state = super().finish(theta, local)
        bad = (len(local.data) - 7) // 3 in self.which
        return {"delta": upload["delta"] * float("nan") if bad else upload["delta"]}, state


@pytest.mark.parametrize("which", [(0, 5, 50), tuple(range(92, 100)), tuple(range(0, 100, 7))])
def test_who_is_left_out_changes_no_bit_between_engines(which: tuple[int, ...]) -> None:
    """The largest clients come first, so that clients 92 ... 99 are the first block."""
    settings: dict[str, Any] = {
        "data": small_federation(clients=100), "cohort": None, "local": LocalWork(steps=1, batch_size=8, lr=0.1)
    }  # fmt: skip
    runs = [finished(federation(SpoilsBlocks(which=which), workers=n, **settings), 2) for n in (0, 1, 2)]
    assert [r.skipped for r in runs[0]] == [r.skipped for r in runs[1]] == [r.skipped for r in runs[2]]
    assert set(runs[0][0].skipped) == set(which) and 8 * BLOCK_LENGTH < 100
    for other in runs[1:]:
        assert torch.equal(other[-1].state.theta, runs[0][-1].state.theta)
        assert other[-1].train_loss == runs[0][-1].train_loss


def test_stop_ends_the_run_and_names_the_client() -> None:
    with pytest.raises(FedadcError, match=r"round 1, client (3|9): its update is not finite; faults.bad_update=skip"):
        list(federation(Spoils(), Faults(bad_update="stop"), cohort=None).rounds(2))


@pytest.mark.parametrize("method", [Spoils(which=tuple(range(CLIENTS))), LocalOnly(), FedADC()])
def test_a_cohort_of_which_all_are_bad_ends_the_run_with_advice(method: Method) -> None:
    work = LocalWork(epochs=1, batch_size=4, lr=0.1 if isinstance(method, Spoils) else 1e30)
    with pytest.raises(FedadcError, match=r"round \d: no client's update is finite.*local\.lr or set local\.clip"):
        list(federation(method, local=work).rounds(3))


def test_finite_is_told_from_a_sum_that_overflows() -> None:
    huge = torch.full((9,), 3e38)
    assert all_finite({"v": huge}) and not torch.isfinite(huge.sum())
    for value in (float("nan"), float("inf"), -float("inf")):
        for at in (0, 4, 8):
            v = torch.ones(9)
            v[at] = value
            assert not all_finite({"fine": torch.ones(3), "v": v})
    both = torch.tensor([float("inf"), -float("inf")])
    assert not all_finite({"v": both}) and all_finite({}) and all_finite({"n": torch.arange(4)})


# --- updates that are too large --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_delta_beyond_the_bound_is_scaled_down_to_it(workers: int) -> None:
    free, limit = federation(FedAvg(), cohort=1), 0.05
    bounded = federation(FedAvg(), Faults(max_norm=limit), cohort=1, workers=workers)
    start = free.start().theta
    delta = start - finished(free, 1)[0].state.theta
    clipped = start - finished(bounded, 1)[0].state.theta
    assert delta.norm() > limit
    assert torch.allclose(clipped, delta * (limit / delta.norm()), atol=1e-15)
    loose = finished(federation(FedAvg(), Faults(max_norm=1e6)), 3)[-1]
    assert torch.equal(loose.state.theta, finished(federation(FedAvg()), 3)[-1].state.theta)


def test_a_client_beyond_the_bound_is_left_out_if_asked_for() -> None:
    norms = []
    one = federation(FedAvg(), cohort=None)
    for client in range(CLIENTS):
        steps = int(steps_of(one, np.array([client]))[0])
        broadcast = ServerBroadcast(1, 0.1, one.start().theta, {}, 1.0)
        norms.append(float(one.simulated.train(broadcast, ClientTask(client, steps), None).sum["delta"].norm()))
    limit = sorted(norms)[CLIENTS // 2]
    (result,) = finished(federation(FedAvg(), Faults(max_norm=limit, too_large="skip"), cohort=None), 1)
    assert {*result.skipped} == {k for k, norm in enumerate(norms) if norm > limit} != set()
    with pytest.raises(FedadcError, match=r"no client's update is finite and within faults\.max_norm"):
        finished(federation(FedAvg(), Faults(max_norm=1e-9, too_large="skip")), 1)
    with pytest.raises(FedadcError, match=r"its update is not finite and within faults\.max_norm; faults\.bad_update"):
        finished(federation(FedAvg(), Faults(max_norm=limit, too_large="skip", bad_update="stop"), cohort=None), 1)


def test_feddyn_refuses_clipping_since_its_clients_keep_what_they_sent() -> None:
    with pytest.raises(FedadcError, match="feddyn needs uncompressed deltas"):
        federation(FedDyn(), Faults(max_norm=1.0))
    finished(federation(FedDyn(), Faults(max_norm=1.0, too_large="skip")), 1)


@pytest.mark.parametrize("bad", [0, -1.0, float("inf"), float("nan")])
def test_a_bound_must_be_positive_and_finite(bad: float) -> None:
    with pytest.raises(FedadcError, match="max_norm must be positive and finite"):
        Faults(max_norm=bad)
