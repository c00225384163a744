"""Traces: a simulation repeats who joined, was absent and did not count. Means over all clients stay means."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import small_federation
from fedadc.config.build import prepare
from fedadc.data.dataset import Dataset
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import METHODS, FedAvg, FedDyn, LocalOnly, Method, Scaffold
from fedadc.models import MLP
from fedadc.models.vectors import State, Vector
from fedadc.runs.record import load_config
from fedadc.selections import Covering
from fedadc.training.aggregate import BLOCK_LENGTH
from fedadc.training.faults import Faults
from fedadc.training.state import Round
from fedadc.training.trace import Trace, TraceLine
from fedadc.views.local import Local
from fedadc.views.local_work import LocalWork

CLIENTS = 12
NAMES = tuple(map(str, range(CLIENTS)))
ROUNDS = 6


def federation(method: Method, faults: Faults | None = None, data: Dataset | None = None, **kw: Any) -> Federation:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"cohort": 0.5, **kw}
    return Federation(
        model=MLP((5,), 4, [6], projection=3).double(),
        data=data or small_federation(clients=CLIENTS),
        local=LocalWork(epochs=1, batch_size=4, lr=0.1),
        method=method,
        faults=faults,
        **settings,
    )


def traced(folder: Path, *lines: TraceLine) -> Faults:
    (folder / "trace.jsonl").write_text("".join(line.text() for line in lines))
    return Faults(trace=str(folder / "trace.jsonl"))


def first(data: Dataset, clients: int) -> Dataset:
    """The same data, of the first clients only."""
    assert data.owners is not None
    kept = np.flatnonzero(data.owners < clients)
    return replace(data, train=data.train.take(kept), owners=data.owners[kept])


def same(a: Round, b: Round) -> bool:
    """Whether two rounds ended with the same bits."""
    states = [{"theta": r.state.theta, **r.state.server} for r in (a, b)]
    clients = [dict(r.state.clients.items()) for r in (a, b)]
    return (
        all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        and clients[0].keys() == clients[1].keys()
        and all(torch.equal(clients[0][k][n], clients[1][k][n]) for k in clients[0] for n in clients[0][k])
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_trace_in_which_nothing_happens_changes_no_bit(name: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    plain = list(federation(method).rounds(3))
    repeated = list(federation(method, traced(tmp_path, TraceLine(1, NAMES))).rounds(3))
    assert all(same(a, b) for a, b in zip(plain, repeated, strict=True))


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ("scaffold", "feddyn")])  # these count all clients
def test_a_client_that_is_always_absent_is_like_no_client(name: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    data = small_federation(clients=CLIENTS)
    lines = [TraceLine(t, NAMES if t == 1 else (), absent=NAMES[-1:]) for t in range(1, ROUNDS + 1)]
    here = list(federation(method, traced(tmp_path, *lines), data).rounds(ROUNDS))
    fewer = list(federation(method, None, first(data, CLIENTS - 1)).rounds(ROUNDS))
    assert [r.cohort for r in here] == [r.cohort for r in fewer]
    assert all(same(a, b) for a, b in zip(here, fewer, strict=True))
    assert all(r.absent == (CLIENTS - 1,) for r in here)


@pytest.mark.parametrize("name", METHODS)
def test_until_somebody_joins_a_federation_is_the_smaller_one(name: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    data = small_federation(clients=CLIENTS)
    lines = [TraceLine(1, NAMES[:9]), TraceLine(2), TraceLine(3, NAMES[9:])]
    here = list(federation(method, traced(tmp_path, *lines), data).rounds(ROUNDS))
    small = list(federation(method, None, first(data, 9)).rounds(2))
    assert all(same(a, b) for a, b in zip(here[:2], small, strict=True))
    assert here[2].joined == (9, 10, 11) and {len(r.cohort) for r in here[:2]} != {len(r.cohort) for r in here[2:]}
    assert max(max(r.cohort) for r in here) > 8


@pytest.mark.parametrize("method", [Scaffold(), FedDyn()], ids=["scaffold", "feddyn"])
def test_means_over_all_clients_stay_means_when_clients_join_leave_and_fail(method: Method, tmp_path: Path) -> None:
    lines = [
        TraceLine(1, NAMES[:4]), TraceLine(2, absent=NAMES[:1]), TraceLine(3, NAMES[4:7], dropped=NAMES[2:4]),
        TraceLine(4, NAMES[7:8], absent=NAMES[2:5], skipped=NAMES[7:8]), TraceLine(5, NAMES[8:]),
    ]  # fmt: skip
    trained = federation(method, traced(tmp_path, *lines), cohort=0.8)
    name, joined = ("c", "c") if isinstance(method, Scaffold) else ("h", "h")
    for result in trained.rounds(8):
        known = trained.coordinator.members.count(result.round)
        states = [result.state.clients.get(k) for k in range(known)]
        mean = sum(torch.zeros(1) if s is None else s[joined] for s in states) / known
        assert torch.allclose(result.state.server[name], torch.as_tensor(mean), atol=1e-14), result.round
    assert any(r.skipped for r in federation(method, traced(tmp_path, *lines), cohort=1.0).rounds(4))


def test_the_mean_model_of_feddyn_does_not_jump_when_a_client_joins(tmp_path: Path) -> None:
    faults = traced(tmp_path, TraceLine(1, NAMES[:6]), TraceLine(2), TraceLine(3, NAMES[6:]))
    method = FedDyn()
    trained = federation(method, faults)
    before = list(trained.rounds(2))[-1].state
    after = trained.coordinator.at_start_of(3, before)
    assert torch.allclose(after.server["h"], before.server["h"] / 2, atol=1e-15)
    means = [method.evaluated(state.theta, state.server)["mean"] for state in (before, after)]
    assert torch.allclose(*means, atol=1e-14) and not torch.equal(before.theta, after.theta)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_dropped_and_skipped_does_not_count(workers: int, tmp_path: Path) -> None:
    lost = [TraceLine(1, NAMES, dropped=NAMES[3:5]), TraceLine(2, skipped=NAMES[:1])]
    trained = federation(FedAvg(), traced(tmp_path, *lost), cohort=None, workers=workers)
    rounds = list(trained.rounds(2))
    trained.close()
    alone = federation(FedAvg(), cohort=None)
    state = alone.start()
    for result, left_out in zip(rounds, ({3, 4}, {0}), strict=True):
        deltas = {}
        for client in set(range(CLIENTS)) - left_out:  # the mean, by hand, of what each client would upload
            deltas[client] = _delta(alone, state, client)
        state = replace(state, round=result.round, theta=state.theta - sum(deltas.values()) / len(deltas))
        assert torch.allclose(result.state.theta, state.theta, atol=1e-14)
        assert set(result.dropped) | set(result.skipped) == left_out


@dataclass(frozen=True, kw_only=True)
class NotFinite(FedAvg):
    """The client with so many samples sends NaN."""

    size: int = 0

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        upload, state = super().finish(theta, local)
        return ({"delta": upload["delta"] * torch.nan} if len(local.data) == self.size else upload), state


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_client_keeps_its_place_as_one_whose_update_is_not_finite(workers: int, tmp_path: Path) -> None:
    sizes = federation(FedAvg()).clients.sizes.tolist()
    size = next(size for size in sorted(sizes, reverse=True) if sizes.count(size) == 1)  # among the first to be added
    faults = traced(tmp_path, *(TraceLine(t, NAMES * (t == 1), skipped=(str(sizes.index(size)),)) for t in (1, 2)))
    traced_run = federation(FedAvg(), faults, cohort=None, workers=workers)
    skipped, sent = list(traced_run.rounds(2)), list(federation(NotFinite(size=size), cohort=None).rounds(2))
    traced_run.close()
    assert len(sizes) > BLOCK_LENGTH and all(r.skipped == (sizes.index(size),) for r in skipped + sent)
    assert all(same(a, b) for a, b in zip(skipped, sent, strict=True))


def _delta(alone: Federation, state: Any, client: int) -> torch.Tensor:
    from fedadc.training.messages import ClientTask, ServerBroadcast

    work, sizes = alone.agreement.work, alone.clients.sizes
    steps = int(work.count_steps(sizes[[client]])[0])
    broadcast = ServerBroadcast(state.round + 1, work.lr, state.theta, {}, 1.0)
    return alone.simulated.train(broadcast, ClientTask(client, steps), None).sum["delta"]


def test_selections_draw_from_those_that_are_present(tmp_path: Path) -> None:
    data = small_federation(clients=CLIENTS)
    lines = [TraceLine(t, NAMES if t == 1 else (), absent=NAMES[t : t + 3]) for t in range(1, 8)]
    for result in federation(FedAvg(), traced(tmp_path, *lines), data, selection=Covering(), cohort=6).rounds(7):
        assert not {*result.cohort} & {*range(result.round, result.round + 3)} and len(result.cohort) == 6


def test_a_cohort_is_never_larger_than_those_that_are_present(tmp_path: Path) -> None:
    faults = traced(tmp_path, TraceLine(1, NAMES, absent=NAMES[2:]))
    assert [len(r.cohort) for r in federation(FedAvg(), faults, cohort=5).rounds(2)] == [2, 5]


def test_clients_have_the_numbers_of_the_trace(tmp_path: Path) -> None:
    order = NAMES[::-1]
    trained = federation(LocalOnly(), traced(tmp_path, TraceLine(1, order)))
    plain = federation(LocalOnly())
    assert trained.client_names == order
    for number, name in enumerate(order):
        assert np.array_equal(trained.clients[number], plain.clients[plain.client_names.index(name)])


def test_sites_that_join_later_do_not_change_how_a_table_is_encoded(tmp_path: Path) -> None:
    rows = [("a", 1, "red", "yes"), ("a", 2, "blue", "no"), ("b", 3, "red", "no"), ("b", 5, "blue", "yes")] * 5
    rows += [("c", 9, "green", "yes"), ("c", 8, "red", "no")] * 5
    text = "client,size,color,label\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    (tmp_path / "all.csv").write_text(text)
    (tmp_path / "ab.csv").write_text("".join(line + "\n" for line in text.splitlines() if not line.startswith("c,")))
    traced(tmp_path, TraceLine(1, ("a", "b")), TraceLine(2, ("c",)))
    tree = {
        "rounds": 1,
        "model": "mlp",
        "data": {"name": "csv", "path": "all.csv", "label": "label", "client": "client"},
    }
    whole = prepare(load_config({**tree, "faults": {"trace": "trace.jsonl"}}, folder=tmp_path)).federation
    first = prepare(load_config({**tree, "data": {**tree["data"], "path": "ab.csv"}}, folder=tmp_path)).federation
    assert whole.data.encoding == first.data.encoding and whole.client_names == ("a", "b", "c")
    assert prepare(load_config(tree, folder=tmp_path)).federation.data.encoding != first.data.encoding


BAD = {
    "": "is empty",
    "no json\n": "line 1 is not JSON",
    "[1]\n": "must have a round and lists of names",
    '{"round": "1"}\n': "must have a round and lists of names",
    '{"round": 1, "joined": [1]}\n': "must have a round and lists of names",
    '{"round": 1, "joined": ["0"], "who": []}\n': "must have a round and lists of names",
    '{"round": 2, "joined": ["0"]}\n': "line 1 is of round 2, but it must be of 1",
    '{"round": 1, "joined": ["0", "0"]}\n': "a client joins for the second time",
    '{"round": 1, "joined": ["0"]}\n{"round": 2, "joined": ["0"]}\n': "line 2: a client joins for the second time",
    '{"round": 1, "joined": ["0"], "dropped": ["1"]}\n': "client 1 has not joined",
    '{"round": 1, "joined": ["0"], "absent": ["0"]}\n': "all clients are absent",
    '{"round": 1}\n': "all clients are absent",
    '{"round": 1, "joined": ["nobody"]}\n': "the data has no client nobody",
    "[" * 100_000: "line 1 is not JSON",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_trace_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(FedadcError, match=BAD[text]) as refused:
        federation(FedAvg(), Faults(trace=str(tmp_path / "trace.jsonl")))
    assert "\n" not in str(refused.value) and "faults.trace" in str(refused.value)


def test_a_missing_trace_and_one_that_needs_pull_are_refused(tmp_path: Path) -> None:
    from fedadc.communication.downlinks import Broadcast
    from fedadc.communication.network import Communication

    with pytest.raises(FedadcError, match=r"faults\.trace.*gone\.jsonl"):
        federation(FedAvg(), Faults(trace=str(tmp_path / "gone.jsonl")))
    joins = traced(tmp_path, TraceLine(1, NAMES[:9]), TraceLine(2, NAMES[9:]))
    with pytest.raises(FedadcError, match="broadcast needs the same clients in every round"):
        federation(FedAvg(), joins, communication=Communication(downlink=Broadcast()))
    drops = traced(tmp_path, TraceLine(1, NAMES, dropped=NAMES[:2]))
    list(federation(FedAvg(), drops, communication=Communication(downlink=Broadcast())).rounds(2))


def test_a_trace_is_written_as_it_is_read(tmp_path: Path) -> None:
    lines = (TraceLine(1, ("zürich", "bern")), TraceLine(2, (), ("bern",), ("zürich",), ("zürich",)))
    traced(tmp_path, *lines)
    assert Trace.read(tmp_path / "trace.jsonl").lines == lines
    assert json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[1])["absent"] == ["bern"]
