"""Whatever a site sends, a federation with a quorum goes on: it is left out, and the others are not held up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from test_quorum import config

from direct_sites import CLIENTS, Direct, Interrupted, Unreliable, round_of, sites_of
from fedadc.errors import DiskError, FedadcError, WorkersLost
from fedadc.runs.record import read_run
from fedadc.sites import connections, requests
from fedadc.sites.connections import SiteConnections
from fedadc.sites.journal import audit_file
from fedadc.sites.packets import NOT_JOINED, PROBLEM, Kind, Lost, Packet
from fedadc.sites.requests import Limits, Requests
from fedadc.sites.serving import recorded_terms, serve
from fedadc.sites.site import Site
from fedadc.sites.status import read_status
from fedadc.system.files import to_safetensors

Change = Callable[[Site, Kind, Packet, Packet], Packet]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connections, requests):
        monkeypatch.setattr(module, "LOOK_AGAIN", 0.003)


class Malicious(Unreliable):
    """Sites whose answers are changed."""

    def __init__(self, sites: Collection[Site], change: Change, **given: Any) -> None:
        super().__init__(sites, **given)
        self.change = change

    def key(self, node: int) -> bytes:
        return self.sites[node].name.encode()

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        number = super().send(node, kind, packet)
        if isinstance(answer := self.answers.get(number), Packet) and number != "refused":
            self.answers[number] = self.change(self.sites[node], kind, packet, answer)
        return number


def events(folder: Path) -> str:
    return "\n".join(event for r in read_run(folder / "run").records for event in r.get("events", ()))


def counts_with(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    """The counts of one site are changed."""

    def changed(site: Site, kind: Kind, request: Packet, answer: Packet) -> Packet:
        if site.name != "emil" or kind != "count":
            return answer
        tensors = load(answer.body)
        change(tensors)
        return replace(answer, body=to_safetensors({name: tensor.contiguous() for name, tensor in tensors.items()}))

    return changed


def overflow(tensors: dict[str, torch.Tensor]) -> None:
    table = tensors["test.confusion"]
    total = int(table.sum())
    table[:] = 0
    table[0, 0], table[1, 1], table[0, 1] = 2**63 - 1, 2**63 - 1, total + 2


COUNTS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "another type": lambda t: t.update({"test.confusion": t["test.confusion"].to(torch.bfloat16)}),
    "infinity": lambda t: t.update({"test.top5": torch.tensor([float("inf")])}),
    "a loss that is no number": lambda t: t["test.loss"].fill_(float("nan")),
    "a negative loss": lambda t: t["test.loss"].fill_(-1e300),
    "a loss of another shape": lambda t: t.update({"test.loss": torch.ones(2, 2, dtype=torch.float64)}),
    "a split that it does not have": lambda t: t.update({f"other.{n}": t[f"test.{n}"] for n in ("loss", "top5")}),
    "nothing": lambda t: t.clear(),
    "sums that overflow": overflow,
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_that_cannot_be(name: str, site_arrays: Path) -> None:
    settings = config(site_arrays, quorum=0.6, changes={"cohort": {}, "rounds": 2})
    transport = Malicious(sites_of(site_arrays, settings), counts_with(COUNTS[name]))
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    assert "evaluation without emil: site emil sent counts" in events(site_arrays)
    assert 0 <= read_run(site_arrays / "run").records[-1]["test_accuracy"] <= 1


@pytest.mark.parametrize("size", [0, -3, 10**30])
def test_a_newcomer_with_an_impossible_size(size: int, site_arrays: Path) -> None:
    def lie(site: Site, kind: Kind, request: Packet, answer: Packet) -> Packet:
        if site.name != "emil" or kind != "agree":
            return answer
        told = json.loads(answer.body)
        told["sizes"]["train"] = size
        return replace(answer, body=json.dumps(told).encode())

    settings = config(site_arrays, CLIENTS[:4], open=True)
    transport = Malicious(sites_of(site_arrays, settings), lie, here={"emil": range(3, 9)})
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    assert len(read_run(site_arrays / "run").records) == settings.rounds
    assert not [r for r in read_run(site_arrays / "run").records if "joined" in r]


def test_a_bad_upload_does_not_use_up_the_retries(site_arrays: Path) -> None:
    """One of three sends garbage, one is slow: the slow one is asked again."""
    settings = config(site_arrays, CLIENTS[:3], quorum=0.6, retries=3, changes={"cohort": {}, "rounds": 3})
    sites = [site for site in sites_of(site_arrays, settings) if site.name in CLIENTS[:3]]
    transport = Unreliable(sites, {(2, "anna"): "garbage", (2, "bert"): "late once"})
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    assert [name for t, name in transport.asked if t == 2 and name == "bert"] == ["bert", "bert"]
    assert read_run(site_arrays / "run").records[1]["dropped"] == [0]


def test_what_is_said_under_a_name_needs_its_key(site_arrays: Path) -> None:
    """A site cannot stop a run by saying that another one has a problem."""

    def accuse(site: Site, kind: Kind, request: Packet, answer: Packet) -> Packet:
        accuses = site.name == "emil" and kind == "hello"
        return Packet({"client": "bert", PROBLEM: "the disk is full"}) if accuses else answer

    settings = config(site_arrays, CLIENTS[:4], quorum=0.6)
    transport = Malicious(sites_of(site_arrays, settings), accuse)
    federated = SiteConnections(transport, 1.0, key_of=lambda name: name.encode())
    assert federated.wait_for(CLIENTS[:4]) == list(CLIENTS[:4])
    assert not federated.journal.site("bert").refused and not federated.problems
    assert "its key is not that of site bert" in "\n".join(federated.journal.events.take())


def interrupted(folder: Path, quorum: float) -> tuple[Any, list[Site]]:
    """A run whose server has died, and its sites."""
    settings = config(folder, quorum=quorum, changes={"cohort": {}, "rounds": 3})
    sites = sites_of(folder, settings)
    transport = Unreliable(sites)
    transport.limit = 25
    with pytest.raises(Interrupted):
        serve(settings, transport, folder / "run", watch=transport.after)
    return settings, sites


@pytest.mark.parametrize(
    "said", [Packet({"client": "anna", PROBLEM: "the disk is full"}), Packet({"client": "anna"}, body=b"{}")]
)
def test_a_quorum_is_enough_at_a_restart_too(said: Packet, site_arrays: Path) -> None:
    settings, sites = interrupted(site_arrays, quorum=0.6)

    def fail(site: Site, kind: Kind, request: Packet, answer: Packet) -> Packet:
        return said if site.name == "anna" and kind == "hello" else answer

    again = Malicious(sites, fail)
    serve(settings, again, site_arrays / "run", watch=again.after)
    assert read_run(site_arrays / "run").records[-1]["dropped"] == [0]


class Silent:
    """Nodes that answer everything at once, but for some that never do."""

    def __init__(self, many: int, silent: Collection[int] = (), nameless: Collection[int] = ()) -> None:
        self.many, self.silent, self.nameless = many, silent, nameless
        self.answers: dict[str, Packet | Lost] = {}
        self.asked: list[tuple[Kind, int]] = []

    def nodes(self) -> Collection[int]:
        return range(1, self.many + 1)

    def key(self, node: int) -> bytes:
        return b""

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        self.asked.append((kind, node))
        if node not in (self.nameless if kind == "hello" else self.silent):
            self.answers[str(len(self.asked))] = Packet({"client": f"s{node:02d}"}, b"x")
        return str(len(self.asked))

    def receive(self, numbers: Collection[str]) -> Mapping[str, Packet | Lost]:
        return {number: self.answers.pop(number) for number in numbers if number in self.answers}


@pytest.mark.parametrize("at_once", [2, 4, None])
def test_a_silent_site_takes_one_place_of_those_that_work_at_once(at_once: int | None) -> None:
    transport = Silent(20, silent=(1,))
    federated = SiteConnections(transport, 3.0, at_once=at_once)
    names = [f"s{number:02d}" for number in range(1, 21)]
    federated.wait_for(names)
    answers = list(Requests(federated, "train", [(n, Packet()) for n in names], None, Limits(1.0, 12)).answers())
    assert sum(isinstance(answer, Packet) for answer in answers) == 19


def test_a_node_that_never_says_its_name_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HELLO_TAKES", 0.1)
    federated = SiteConnections(Silent(3, nameless=(1,)), 2.0, at_once=1)
    assert federated.wait_for(["s02", "s03"]) == ["s02", "s03"]


def test_sites_that_say_that_they_have_not_joined_do_not_move_the_deadline(site_arrays: Path) -> None:
    liars, asked = ("anna", "bert", "carl"), False

    def lie(site: Site, kind: Kind, request: Packet, answer: Packet) -> Packet:
        nonlocal asked
        if site.name in liars and kind == "train" and round_of(request) == 2:
            asked = True
            return Packet({PROBLEM: "it has nothing", NOT_JOINED: True})
        return answer

    class Deaf(Malicious):
        def send(self, node: int, kind: Kind, packet: Packet) -> str:
            number = super().send(node, kind, packet)
            if kind == "agree" and asked and self.sites[node].name in liars:
                del self.answers[number]
            return number

    settings = config(site_arrays, quorum=0.4, deadline=1.0, changes={"cohort": {}, "rounds": 2})
    transport, ends = Deaf(sites_of(site_arrays, settings), lie), [0.0]
    serve(settings, transport, site_arrays / "run", watch=lambda r: (ends.append(time.monotonic()), transport.after(r)))
    assert read_run(site_arrays / "run").records[1]["dropped"] == [0, 1, 2]
    assert ends[2] - ends[1] < 1.0 + 3 * 0.2 + 0.9, "three deadlines one after the other would be 3 s"


def test_newcomers_that_do_not_answer_are_waited_for_together_and_once(site_arrays: Path) -> None:
    settings = config(site_arrays, CLIENTS[:3], open=True, deadline=1.0, changes={"rounds": 4})

    class Deaf(Malicious):
        def send(self, node: int, kind: Kind, packet: Packet) -> str:
            number = super().send(node, kind, packet)
            if kind == "agree" and self.sites[node].name in ("dora", "emil"):
                del self.answers[number]
            return number

    here = {"dora": range(2, 9), "emil": range(2, 9)}
    transport, ends = Deaf(sites_of(site_arrays, settings), lambda s, k, r, a: a, here=here), [0.0]
    serve(settings, transport, site_arrays / "run", watch=lambda r: (ends.append(time.monotonic()), transport.after(r)))
    assert ends[4] - ends[1] < 2 * 1.0 + 0.9


def test_a_newcomer_behind_one_that_is_refused_gets_its_own_number(site_arrays: Path) -> None:
    settings = config(site_arrays, CLIENTS[:3], open=True, quorum=0.01, changes={"cohort": {}, "method": "scaffold"})
    np.savez(site_arrays / "dora.npz", x=np.ones((9, 5)), y=np.arange(9) % 3)
    transport = Unreliable(sites_of(site_arrays, settings), here={"dora": range(3, 9), "emil": range(3, 9)})
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    records = read_run(site_arrays / "run").records
    assert recorded_terms(site_arrays / "run").names == (*CLIENTS[:3], "emil")
    assert 3 in records[-1]["cohort"] and "dropped" not in records[-1]


def test_a_log_that_cannot_be_written_ends_a_run_with_a_sentence(site_arrays: Path) -> None:
    settings = config(site_arrays, changes={"rounds": 3})
    transport = Unreliable(sites_of(site_arrays, settings))

    def in_the_way(record: Mapping[str, Any]) -> None:
        transport.after(record)
        (site_arrays / "run-log.jsonl").unlink(missing_ok=True)
        (site_arrays / "run-log.jsonl").mkdir(exist_ok=True)

    with pytest.raises(DiskError, match=r"run-log\.jsonl cannot be written"):
        serve(settings, transport, site_arrays / "run", watch=in_the_way)
    status = read_status(site_arrays / "run")
    assert status is not None and status.state == "failed" and "cannot be written" in status.error


def test_a_bug_is_in_the_status(site_arrays: Path) -> None:
    settings = config(site_arrays, changes={"rounds": 3})

    def fail(record: Mapping[str, Any]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve(settings, Direct(sites_of(site_arrays, settings)), site_arrays / "run", watch=fail)
    status = read_status(site_arrays / "run")
    assert status is not None and status.state == "failed" and "ZeroDivisionError" in status.error


def test_the_end_of_the_audit_file_is_known(site_arrays: Path) -> None:
    from fedadc.sites.overview import federation_status

    settings = config(site_arrays, changes={"rounds": 2})
    serve(settings, Direct(sites_of(site_arrays, settings)), site_arrays / "run")
    assert federation_status(site_arrays / "run").changed is None
    lines = audit_file(site_arrays / "run").read_text().splitlines(keepends=True)
    audit_file(site_arrays / "run").write_text("".join(lines[:-1]) + lines[-1].replace("finished", "Finished"))
    assert federation_status(site_arrays / "run").changed == len(lines)
    audit_file(site_arrays / "run").write_text("".join(lines[:-2]))
    assert federation_status(site_arrays / "run").changed == len(lines) - 2


@pytest.mark.parametrize(
    "change",
    [
        {"process": "x"}, {"updated": None}, {"metrics": {"a": "b"}}, {"sites": {"anna": {"bytes_up": "x"}}},
        {"sites": 3}, {"activity": {"kind": "dance"}},
    ],
)  # fmt: skip
def test_a_status_with_values_of_other_types(change: Mapping[str, Any], site_arrays: Path) -> None:
    settings = config(site_arrays, changes={"rounds": 1})
    serve(settings, Direct(sites_of(site_arrays, settings)), site_arrays / "run")
    file = site_arrays / "run-status.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert read_status(site_arrays / "run") is None


def test_retries_need_something_to_wait_for(site_arrays: Path) -> None:
    with pytest.raises(FedadcError, match="retries need a deadline or a quorum"):
        config(site_arrays, quorum=None, deadline=None, retries=2)


def test_too_few_sites_at_a_restart(site_arrays: Path) -> None:
    settings, sites = interrupted(site_arrays, quorum=0.8)

    def fail(site: Site, kind: Kind, request: Packet, answer: Packet) -> Packet:
        lies = site.name in ("anna", "bert") and kind == "hello"
        return Packet({"client": site.name}, body=b"{}") if lies else answer

    with pytest.raises(WorkersLost, match="3 of 5 sites can go on; 4 are needed"):
        serve(settings, Malicious(sites, fail), site_arrays / "run")
