"""Requests to sites that are slow, silent or answer twice: deadlines, retries, and places among those that work."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import pytest

from fedadc.engines.remote import NoAnswer
from fedadc.sites import connections, requests
from fedadc.sites.connections import SiteConnections
from fedadc.sites.packets import PROBLEM, REFUSED, Kind, Lost, Packet
from fedadc.sites.requests import Limits, Requests

DEADLINE = 0.15


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connections, requests):
        monkeypatch.setattr(module, "LOOK_AGAIN", 0.003)


class Nodes:
    """Nodes that do one thing after the other; node k takes `takes[k]` seconds, and infinitely long if it is silent."""

    def __init__(self, takes: Mapping[int, float]) -> None:
        self.takes, self.free = dict(takes), dict.fromkeys(takes, 0.0)
        self.due: dict[str, tuple[float, Packet]] = {}
        self.asked: list[tuple[Kind, int]] = []

    def nodes(self) -> Collection[int]:
        return list(self.takes)

    def key(self, node: int) -> bytes:
        return b""

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        self.asked.append((kind, node))
        number = str(len(self.asked))
        if kind == "hello":
            self.due[number] = 0.0, self.hello(node)
        else:
            self.free[node] = max(time.monotonic(), self.free[node]) + self.takes[node]
            self.due[number] = self.free[node], self.answer(node, len(self.of(node)))
        return number

    def hello(self, node: int) -> Packet:
        return Packet({"client": f"s{node:02d}"})

    def answer(self, node: int, times: int) -> Packet:
        return Packet({}, b"x")

    def of(self, node: int) -> list[Kind]:
        """What a node was asked for, beside its name."""
        return [kind for kind, asked in self.asked if asked == node and kind != "hello"]

    def receive(self, numbers: Collection[str]) -> Mapping[str, Packet | Lost]:
        now = time.monotonic()
        return {n: self.due.pop(n)[1] for n in list(numbers) if n in self.due and self.due[n][0] <= now}


SILENT = float("inf")


def connected(nodes: Nodes, **settings: int) -> tuple[SiteConnections, list[str]]:
    found, names = SiteConnections(nodes, 3.0, **settings), [f"s{node:02d}" for node in nodes.takes]
    assert found.wait_for(names) == names
    return found, names


def answers(found: SiteConnections, names: list[str], limits: Limits) -> list[Packet | NoAnswer]:
    return list(Requests(found, "train", [(n, Packet()) for n in names], None, limits, "upload").answers())


def test_two_answers_of_one_site_count_once_and_the_second_is_named() -> None:
    class Twice(Nodes):
        """The answers of the first node are there at the same look."""

        def receive(self, numbers: Collection[str]) -> Mapping[str, Packet | Lost]:
            mine = [n for n in numbers if self.asked[int(n) - 1] == ("train", 1)]
            held = mine if len(mine) < 2 else []
            return super().receive([n for n in numbers if n not in held])

    nodes = Twice({1: 0.0, 2: 4 * DEADLINE, 3: SILENT})
    found, names = connected(nodes)
    came = answers(found, names, Limits(DEADLINE, 2, retries=8))
    assert [type(answer) for answer in came] == [Packet, Packet, NoAnswer]
    assert "a second upload of site s01 is refused" in found.journal.events.take()


def test_sites_whose_answers_do_not_count_are_asked_again_while_there_are_retries() -> None:
    class Failing(Nodes):
        def answer(self, node: int, times: int) -> Packet:
            fails = node in (1, 2) and times == 1
            return Packet({PROBLEM: "stale file handle"}) if fails else Packet({}, b"x")

    nodes = Failing({1: 0.0, 2: 0.0, 3: 0.0})
    found, names = connected(nodes)
    assert all(isinstance(answer, Packet) for answer in answers(found, names, Limits(DEADLINE, 2, retries=1)))
    assert [len(nodes.of(node)) for node in (1, 2, 3)] == [2, 2, 1]
    assert any("site s01: stale file handle; it is asked again" in event for event in found.journal.events.take())
    nodes = Failing({1: 0.0, 2: 0.0, 3: 0.0})  # with a quorum, nobody is asked again
    found, names = connected(nodes)
    came = answers(found, names, Limits(DEADLINE, 1, retries=1))
    assert [type(answer) for answer in came] == [NoAnswer, NoAnswer, Packet] and len(nodes.of(1)) == 1


@pytest.mark.parametrize("fact", [PROBLEM, REFUSED])
def test_what_a_site_says_is_one_short_line(fact: str) -> None:
    class Shouting(Nodes):
        def answer(self, node: int, times: int) -> Packet:
            return Packet({fact: "\x1b[2J\nround 9: forged\n" + "A" * 60_000})

    found, names = connected(Shouting({1: 0.0}))
    (answer,) = answers(found, names, Limits(DEADLINE, 0))
    assert isinstance(answer, NoAnswer) and len(answer.reason) < 600 and answer.reason.isprintable()


def test_silent_sites_take_no_places_for_ever() -> None:
    nodes = Nodes({node: SILENT if node <= 4 else 0.0 for node in range(1, 21)})
    found, names = connected(nodes, at_once=4)
    came = answers(found, names, Limits(10 * DEADLINE, 10))
    assert sum(isinstance(answer, Packet) for answer in came) == 16


def test_those_that_were_never_asked_come_first_at_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Requests, "_place_takes", SILENT)  # silent sites keep their places until the retry
    nodes = Nodes({node: SILENT if node <= 2 else 0.0 for node in range(1, 5)})
    found, names = connected(nodes, at_once=2)
    came = answers(found, names, Limits(DEADLINE, 2, retries=1))
    assert [type(answer) for answer in came] == [NoAnswer, NoAnswer, Packet, Packet]


def test_a_site_that_was_not_asked_is_not_called_disconnected() -> None:
    nodes = Nodes({1: SILENT, 2: SILENT, 3: 0.0})
    found, names = connected(nodes, at_once=1)
    came = answers(found, names, Limits(DEADLINE, 0))
    reasons = [answer.reason for answer in came if isinstance(answer, NoAnswer)]
    assert not any("not connected" in reason for reason in reasons)


def test_a_hung_site_is_posted_one_message_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HELLO_TAKES", 0.05)
    nodes = Nodes({node: SILENT if node == 1 else 0.0 for node in range(1, 9)})
    found, names = connected(nodes, at_once=4)
    for _ in range(6):
        for name in names:
            if not found.has_post(name):
                found.post(name, "keep", Packet({}, b"y"), lambda answer: None)
        came = answers(found, names[1:5], Limits(4 * DEADLINE, 2))
        assert sum(isinstance(answer, Packet) for answer in came) == 4
    assert nodes.of(1) == ["keep"] and len(found.outgoing) <= 4
    assert nodes.of(2).count("keep") >= 3


def test_a_slow_restart_waits_for_the_deadline_although_patience_is_shorter() -> None:
    found = SiteConnections(Nodes({1: 0.0, 2: 0.0, 3: 0.0}), 0.1)
    assert found.wait_for(["s01", "s02", "s03", "s04"], 3, 0.3, strict=False) == ["s01", "s02", "s03"]


def test_a_node_without_a_name_takes_no_part() -> None:
    class Nameless(Nodes):
        def hello(self, node: int) -> Packet:
            return Packet({"fedadc": "x"}) if node == 3 else super().hello(node)

    nodes = Nameless({1: 0.0, 2: 0.0, 3: 0.0})
    found = SiteConnections(nodes, 1.0, key_of=lambda name: b"", open=True)
    assert found.wait_for(["s01", "s02"]) == ["s01", "s02"]
    found.look()
    assert found.newcomers() == [] and nodes.of(3) == ["refuse"]


def test_what_sites_said_when_they_joined_is_not_kept_of_others() -> None:
    nodes = Nodes({1: 0.0, 2: 0.0})
    found, _ = connected(nodes)
    nodes.takes[3] = nodes.free[3] = 0.0
    found.look()
    assert "s03" not in found.said
