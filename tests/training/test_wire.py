"""Messages as bytes: what is written is read back, and everything else is refused in one sentence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from conftest import small_federation
from fedadc.communication.network import Communication
from fedadc.communication.uplinks import EightBit, TopK, Uplink
from fedadc.data.roster import Roster
from fedadc.engines.remote import Remote
from fedadc.errors import FedadcError
from fedadc.evaluation.metrics import Evaluation
from fedadc.federation import Federation
from fedadc.methods import FedAvg, FedPer, Method, Scaffold
from fedadc.models import MLP
from fedadc.models.vectors import State
from fedadc.selections import Covering
from fedadc.training.client import Client
from fedadc.training.coordinator import Coordinator
from fedadc.training.messages import ClientResult, ClientTask, ServerBroadcast
from fedadc.training.rounds import train, with_events
from fedadc.training.wire import HEADER, Wire
from fedadc.views.local_work import LocalWork


def federation(method: Method | None = None, uplink: Uplink | None = None, **kw: Any) -> Federation:
    torch.manual_seed(0)
    communication = Communication() if uplink is None else Communication(uplink=uplink)
    work = LocalWork(steps=2, batch_size=4, lr=0.3)
    model = MLP((5,), 4, [6])
    kw = {"model": model, "data": small_federation(), "local": work, "communication": communication, **kw}
    return Federation(method=method or Scaffold(), **kw)


def broadcast_of(trained: Federation, round: int = 1) -> ServerBroadcast:
    state = trained.start()
    vectors = {name: state.server[name] + 0.25 for name in trained.coordinator.downlink}
    return ServerBroadcast(round, 0.1, state.theta + 0.5, vectors, 14.5)


def client_of(trained: Federation, number: int = 2) -> Client:
    return Client(trained.agreement, number, trained.data.train.take(trained.clients[number]))


def task_bytes(trained: Federation, round: int = 1, counted: int = 0) -> bytes:
    return Wire(trained.agreement).write_task(broadcast_of(trained, round), ClientTask(2, 2, counted=counted))


@pytest.mark.parametrize("lr", [0.1, 1 / 3, 5e-324, 1.7e308])
def test_a_task_is_read_as_it_was_written(lr: float) -> None:
    trained = federation()
    sent, task = replace(broadcast_of(trained, 7), lr=lr), ClientTask(3, 11, weight=9.0, counted=4)
    wire = Wire(trained.agreement)
    read, its_task = wire.read_task(wire.write_task(sent, task))
    assert (read.round, read.lr, read.mean_samples) == (7, lr, 14.5)
    assert its_task == replace(task, weight=1.0)  # the weight is the server's business
    assert torch.equal(read.theta, sent.theta) and torch.equal(read.server["c"], sent.server["c"])


def test_of_a_part_that_is_not_sent_a_client_has_the_initial_weights() -> None:
    trained = federation(FedPer())
    wire, sent = Wire(trained.agreement), broadcast_of(trained)
    content = wire.write_task(sent, ClientTask(0, 1))
    theta, head = wire.read_task(content)[0].theta, trained.model.part("head")
    assert torch.equal(theta[: head.start], sent.theta[: head.start])
    assert torch.equal(theta[head], trained.agreement.start[head]) and not torch.equal(theta[head], sent.theta[head])
    assert len(load(content)["theta"]) == head.start


@pytest.mark.parametrize("loss", [0.5, 1 / 3, math.nan, math.inf])
@pytest.mark.parametrize("uplink", [None, TopK(share=0.2), EightBit(block=8)])
def test_a_result_is_read_as_it_was_written(uplink: Uplink | None, loss: float) -> None:
    trained = federation(uplink=uplink)
    agreement, wire = trained.agreement, Wire(trained.agreement)
    vector = torch.randn(trained.model.theta.shape)
    own = agreement.client_state(agreement.start)
    upload, kept = agreement.encoded({"delta": vector, "c": 2 * vector}, own, np.random.default_rng(0))
    result = ClientResult(4, upload, {"c": vector, **kept}, loss, finite=False)
    read, keeps_state = wire.read_result(wire.write_result(3, result, True), 3, ClientTask(4, 2))
    assert keeps_state and not read.finite and not read.state  # the state stays at the client
    assert read.loss == loss if math.isfinite(loss) else math.isnan(read.loss)
    assert read.upload.keys() == upload.keys()
    assert all(torch.equal(read.upload[n], v) and read.upload[n].dtype == v.dtype for n, v in upload.items())


def changed(content: bytes, tensors: State | None = None, **facts: Any) -> bytes:
    """A message with other tensors or facts."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][HEADER])
    facts = {name: value for name, value in {**header, **facts}.items() if value != "absent"}
    return save({**load(content), **(tensors or {})}, {HEADER: json.dumps(facts)})


THETA = 5 * 6 + 6 + 6 * 4 + 4
BAD_TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": 2}, "version 2; this fedadc reads version 1"),
    "version as text": ({"version": "1"}, "version '1'"),
    "kind": ({"kind": "result"}, "is a 'result', but a task is expected"),
    "run": ({"agreement": "0" * 64}, "of another run"),
    "steps": ({"steps": 0}, "impossible numbers"),
    "too many steps": ({"steps": 10**30}, "impossible numbers"),
    "a negative lr": ({"lr": -1.0}, "impossible numbers"),
    "no samples": ({"mean_samples": 0.0}, "impossible numbers"),
    "steps as text": ({"steps": "3"}, "header of the message is wrong: "),
    "round": ({"round": -1}, "impossible numbers"),
    "lr": ({"lr": None}, "header of the message is wrong: "),
    "an lr of infinity": ({"lr": math.inf}, "impossible numbers"),
    "no client": ({"client": "absent"}, "header of the message is wrong: "),
    "a further key": ({"path": "/etc/passwd"}, "header of the message is wrong: "),
    "shape": ({"tensors": {"theta": torch.zeros(THETA - 1)}}, r"theta as \[63\] torch.float32, but it must be \[64\]"),
    "dtype": ({"tensors": {"theta": torch.zeros(THETA).half()}}, "torch.float16, but it must be"),
    "a further vector": ({"tensors": {"server.m": torch.zeros(3)}}, r"lacks or should not have server\.m"),
    "too large": ({"tensors": {"server.m": torch.zeros(10**5)}}, "larger than a task can be"),
}


@pytest.mark.parametrize("name", BAD_TASKS)
def test_a_client_refuses_what_is_not_a_task_of_its_run(name: str) -> None:
    trained = federation()
    client = client_of(trained)
    changes, words = BAD_TASKS[name]
    with pytest.raises(FedadcError, match=words):
        client.answer(changed(task_bytes(trained), **changes))
    assert not client.states
    client.answer(task_bytes(trained))


BAD_RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "round": ({"round": 2}, "of round 2, client 2, but round 1, client 2 was asked for"),
    "client": ({"client": 3}, "of round 1, client 3, but"),
    "finite": ({"finite": "yes"}, "header of the message is wrong: "),
    "kind": ({"kind": "task"}, "is a 'task', but a result is expected"),
    "another delta": ({"tensors": {"delta": torch.zeros(THETA)}}, "lacks or should not have delta"),
    "another message": ({"tensors": {"delta.levels": torch.zeros(3)}}, r"lacks or should not have delta\.levels"),
    "shape": ({"tensors": {"c": torch.zeros(3)}}, r"c as \[3\]"),
    "dtype": ({"tensors": {"delta.index": torch.zeros(7)}}, r"delta\.index as \[7\] torch.float32, but .*int32"),
    "a vector that others lack": ({"tensors": {"v": torch.zeros(1)}}, "lacks or should not have v"),
    "too large": ({"tensors": {"v": torch.zeros(10**5)}}, "larger than a result can be"),
    "positions": (
        {"tensors": {"delta.index": torch.full((7,), 10**6, dtype=torch.int32)}},
        "its upload cannot be read",
    ),
}


@pytest.mark.parametrize("bad_first", [False, True])
@pytest.mark.parametrize("name", BAD_RESULTS)
def test_a_server_leaves_out_what_is_not_the_answer_to_its_task(name: str, bad_first: bool) -> None:
    """Whoever answers first."""
    trained = federation(uplink=TopK(share=0.1))
    bad, good, (changes, words) = client_of(trained), client_of(trained, 3), BAD_RESULTS[name]

    def exchange(messages: Sequence[tuple[int, bytes]]) -> Iterator[bytes]:
        for client, message in messages:
            yield good.answer(message) if client == 3 else changed(bad.answer(message), **changes)

    engine, tasks = Remote(trained.agreement, exchange), [ClientTask(3, 2), ClientTask(2, 2)]
    parts = list(engine.run(broadcast_of(trained), tasks[::-1] if bad_first else tasks, {}))
    assert [part.reports[0].client for part in parts] == [3]
    (event,) = engine.take_events()
    assert re.search(rf"^round 1, client 2: .*{words}.*; it is left out$", event) and not engine.take_events()


@pytest.mark.parametrize("distance", [0.0, 1 / 3, math.nan, math.inf])
def test_the_distance_travels_in_the_header(distance: float) -> None:
    trained = federation(FedAvg(), evaluate=Evaluation(drift=True))
    wire = Wire(trained.agreement)
    result = ClientResult(4, {"delta": torch.zeros(THETA)}, {}, 0.5, distance=distance)
    content = wire.write_result(3, result, False)
    read, _ = wire.read_result(content, 3, ClientTask(4, 2))
    assert read.distance == distance if math.isfinite(distance) else math.isnan(read.distance)
    for wrong, words in [
        (-1.0, "impossible distance: -1"),
        (math.inf, "impossible distance"),
        ("1", "wrong: distance"),
    ]:
        with pytest.raises(FedadcError, match=words):
            wire.read_result(changed(content, distance=wrong), 3, ClientTask(4, 2))
    with pytest.raises(FedadcError, match="wrong: distance"):
        wire.read_result(changed(content, distance="absent"), 3, ClientTask(4, 2))


def test_without_drift_a_result_has_no_distance() -> None:
    trained = federation(FedAvg())
    wire = Wire(trained.agreement)
    content = wire.write_result(3, ClientResult(4, {"delta": torch.zeros(THETA)}, {}, 0.5, distance=1.0), False)
    assert b"distance" not in content
    with pytest.raises(FedadcError, match="wrong: distance"):
        wire.read_result(changed(content, distance=1.0), 3, ClientTask(4, 2))
    other = federation(FedAvg(), evaluate=Evaluation(drift=True)).agreement
    with pytest.raises(FedadcError, match="of another run"):
        Wire(other).read_result(content, 3, ClientTask(4, 2))


def test_an_upload_that_is_not_finite_is_reported_and_not_added() -> None:
    trained = federation(FedAvg())
    client = client_of(trained)
    spoiled = {"delta": torch.full((THETA,), math.nan)}
    engine = Remote(trained.agreement, lambda messages: iter([changed(client.answer(m), spoiled) for _, m in messages]))
    (part,) = engine.run(broadcast_of(trained), [ClientTask(2, 2)], {})
    assert part.sum == {} and not part.reports[0].finite


@given(st.binary(max_size=300))
def test_garbage_is_refused(content: bytes) -> None:
    with pytest.raises(FedadcError):
        WIRE.read_task(content)


@given(st.data())
def test_a_damaged_message_is_refused_or_read_as_numbers(data: st.DataObject) -> None:
    """A bit flipped among the numbers cannot be noticed here; transport layers have checksums. Nothing else happens."""
    content = bytearray(MESSAGE)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    try:
        read, _ = WIRE.read_task(bytes(content))
    except FedadcError:
        return
    assert read.theta.shape == (THETA,) and read.server.keys() == {"c"}


TRAINED = federation()
WIRE, MESSAGE = Wire(TRAINED.agreement), task_bytes(TRAINED)


def test_a_client_whose_upload_was_lost_goes_back_to_the_state_that_was_counted() -> None:
    trained = federation()
    client, other = client_of(trained), client_of(trained)
    first = client.answer(task_bytes(trained))
    assert client.answer(task_bytes(trained)) == first  # asked again, because the answer was lost
    client.answer(task_bytes(trained, round=2, counted=1))
    other.answer(task_bytes(trained))
    third = other.answer(task_bytes(trained, round=3, counted=1))
    assert client.answer(task_bytes(trained, round=3, counted=1)) == third  # round 2 was not counted
    with pytest.raises(FedadcError, match="client 2 has no state of round 9"):
        client.answer(task_bytes(trained, round=4, counted=9))
    assert client.states.keys() == {1, 3}
    client.answer(task_bytes(trained))  # an old task, delivered again
    assert client.answer(task_bytes(trained, round=3, counted=1)) == third
    client.forget(before=3)
    assert client.states.keys() == {3}


def test_a_client_refuses_the_task_of_another() -> None:
    trained = federation()
    with pytest.raises(FedadcError, match="for client 2; this is client 3"):
        client_of(trained, 3).answer(task_bytes(trained))


def test_models_of_any_floating_type_have_a_fingerprint() -> None:
    start = federation().agreement.start
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert len({replace(federation().agreement, start=start.to(kind)).fingerprint() for kind in kinds}) == 4


def test_a_selection_that_needs_label_counts_is_refused_where_they_are_not_reported() -> None:
    agreement = federation().agreement
    with pytest.raises(FedadcError, match="needs label counts, which the clients do not report"):
        Coordinator(agreement, Roster(np.full(6, 9)), cohort=3, selection=Covering())
    assert len(Coordinator(agreement, Roster(np.full(6, 9)), cohort=3).select(1)) == 3


def test_halves_that_agree_on_something_else_notice_it() -> None:
    here = federation().agreement
    others = [
        federation(Scaffold(server_lr=0.5)).agreement,
        federation(seed=1).agreement,
        federation(local=LocalWork(steps=2, batch_size=4, lr=0.31)).agreement,
        federation(uplink=TopK()).agreement,
        replace(here, start=here.start + 1e-6),
    ]
    assert here.fingerprint() == federation().agreement.fingerprint()
    assert len({a.fingerprint() for a in [here, *others]}) == 6


def run_apart(
    trained: Federation, clients: dict[int, Client], lost: Collection[tuple[int, int]] = (), **kw: Any
) -> Any:
    """Train with clients that get bytes; the answers of `lost` (round, client) never arrive."""
    rounds = kw.pop("rounds", 4)

    def exchange(messages: Sequence[tuple[int, bytes]]) -> Iterator[bytes | None]:
        for number, message in messages:
            answer = clients[number].answer(message)
            round = Wire(trained.agreement).read_task(message)[0].round
            yield None if (round, number) in lost else answer

    engine = Remote(trained.agreement, exchange)
    state = kw.get("start") or trained.start()
    return list(with_events(train(trained.coordinator, engine.run, rounds, state), engine.take_events))


def test_a_client_whose_answer_is_lost_is_dropped_from_the_round() -> None:
    """As if it had been dropped in a simulation: same theta, same states."""
    trained = federation(cohort=3)
    clients = {k: client_of(trained, k) for k in range(6)}
    cohorts = {t: trained.coordinator.select(t).tolist() for t in range(1, 5)}
    lost = {(1, cohorts[1][0]), (2, cohorts[2][2]), (3, cohorts[3][0]), (3, cohorts[3][1]), (3, cohorts[3][2])}
    rounds = run_apart(trained, clients, lost)
    assert [set(r.dropped) for r in rounds] == [{k for t, k in lost if t == r.round} for r in rounds]
    assert all(len(r.events) == len(r.dropped) for r in rounds) and np.isnan(rounds[2].train_loss)

    class Deaf:
        """The simulation's engine, which loses the same clients."""

        def run(self, broadcast: Any, tasks: Any, states: Any) -> Any:
            heard = [task for task in tasks if (broadcast.round, task.client) not in lost]
            return trained.engine.run(broadcast, heard, states)

    simulated = list(train(trained.coordinator, Deaf().run, 4, trained.start()))
    for a, b in zip(rounds, simulated, strict=True):
        assert torch.equal(a.state.theta, b.state.theta) and torch.equal(a.state.server["c"], b.state.server["c"])
        assert (a.dropped, a.samples, a.bytes_up) == (b.dropped, b.samples, b.bytes_up)
    last = simulated[-1].state.clients
    assert all(torch.equal(clients[k].states[last.counted(k)]["c"], last[k]["c"]) for k in last)


def test_a_server_may_go_back_to_an_earlier_round() -> None:
    trained = federation(cohort=3)
    clients = {k: client_of(trained, k) for k in range(6)}
    whole = run_apart(trained, clients, rounds=6)
    again = run_apart(trained, clients, rounds=6, start=whole[2].state)
    assert [r.round for r in again] == [4, 5, 6] and torch.equal(again[-1].state.theta, whole[-1].state.theta)
