"""Requests to sites by the names of their clients, over any transport. A site that was lost is asked again.

A transport reaches nodes, whose numbers mean nothing and may change when a site starts again. So every new node is
asked for its client's name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedadc.engines.pooled import EventLog
from fedadc.errors import FedadcError, WorkersLost, require
from fedadc.sites.packets import NOT_JOINED, PROBLEM, Kind, Lost, NotSent, Packet
from fedadc.sites.status import JOIN, Activity

LOOK_AGAIN = 0.2  # seconds between two looks for answers
REFUSAL_ARRIVES = 15.0  # seconds, at most
WINDOW = 8  # answers that are fetched ahead of their turn


class Transport(Protocol):
    """Carries packets to nodes and back."""

    def nodes(self) -> Collection[int]:
        """The nodes that are connected."""
        ...

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        """Send a request, and return its number; `NotSent` if it may be tried again."""
        ...

    def receive(self, numbers: Collection[str]) -> Mapping[str, Packet | Lost]:
        """Answers to these requests that have come; each is returned once."""
        ...


class Refused(FedadcError):
    """A site has refused a request."""


@dataclass
class _Request:
    name: str
    packet: Packet
    number: str | None = None  # None: it is not sent
    node: int = 0
    joined_again: bool = False


class SiteConnections:
    """Knows which node has which client. `ask` waits for every answer, also while a site starts again."""

    def __init__(
        self,
        transport: Transport,
        patience: float,
        watch: Callable[[Activity], None] = lambda activity: None,
        at_once: int | None = None,  # requests that are open at the same time; None: any number
    ) -> None:
        self.transport, self.patience, self.watch = transport, patience, watch
        self.at_once = sys.maxsize if at_once is None else at_once
        self.events = EventLog()
        self.hello = Packet()  # with which a new node is greeted; without facts, it says its name only
        self.said: dict[str, Packet] = {}  # client -> its answer to that
        self.found: dict[str, int] = {}  # client -> node
        self._asked: dict[int, str] = {}  # node -> number of the request for its name
        self._known: set[int] = set()  # nodes that have said their names
        self._problems: list[tuple[str, str]] = []  # sites that cannot take part, and why
        self._refusals: list[str] = []  # numbers of messages to sites that were refused
        self._joining = True  # until all sites were found

    def wait_for(self, wanted: Sequence[str] | int) -> list[str]:
        """Wait until these sites, or so many, are connected; returns their names in order."""
        try:
            return self._wait_for(wanted)
        except FedadcError:
            self._await_refusals()
            raise

    def _wait_for(self, wanted: Sequence[str] | int) -> list[str]:
        until = time.monotonic() + self.patience
        while True:
            self._look()
            for name, problem in self._problems:
                require(not isinstance(wanted, int) and name not in wanted, problem, Refused)
            if not isinstance(wanted, int):
                self._refuse_strangers(wanted)
            names = sorted(self.found) if isinstance(wanted, int) else [name for name in wanted if name in self.found]
            total = wanted if isinstance(wanted, int) else len(wanted)
            absent = () if isinstance(wanted, int) else tuple(name for name in wanted if name not in self.found)
            self.watch(Activity(JOIN, total, len(names), absent, tuple(sorted(self.found))))
            missing = total - len(names)
            if missing <= 0:
                require(
                    not isinstance(wanted, int) or len(names) == wanted,
                    f"{len(names)} sites are connected, but federation.sites is {wanted}: {', '.join(names)}.",
                )
                self._joining = False
                return names if isinstance(wanted, int) else list(wanted)
            if time.monotonic() > until:
                those = f"site {', '.join(absent)}" if absent else f"{missing} of {total} sites"
                others = f"; {self._problems[0][1]}" if self._problems else "."
                raise WorkersLost(f"{those} did not connect within {self.patience:g} seconds{others}")
            time.sleep(LOOK_AGAIN)

    def _look(self) -> None:
        """Ask new nodes for their names, and forget those that are gone."""
        nodes = set(self.transport.nodes())
        new = sorted(nodes - self._asked.keys() - self._known)
        for node in new[: max(0, self.at_once - len(self._asked))]:
            if (number := self._sent(node, "hello", self.hello)) is not None:
                self._asked[node] = number
        self._asked = {node: number for node, number in self._asked.items() if node in nodes}
        self._known &= nodes
        self.found = {name: node for name, node in self.found.items() if node in nodes}
        answers = self.transport.receive(list(self._asked.values())) if self._asked else {}
        for node, number in list(self._asked.items()):
            answer = answers.get(number)
            if answer is None:
                continue
            del self._asked[node]
            if isinstance(answer, Lost):
                continue
            self._known.add(node)
            self._add(str(answer.facts.get("client", "")), node, answer)

    def _add(self, name: str, node: int, answer: Packet) -> None:
        if PROBLEM in answer.facts:
            self._problems.append((name, _problem(name, answer)))
            self.events.record(f"a site cannot take part: {self._problems[-1][1]}")
            return
        if self.found.get(name, node) != node and self._joining:
            problem = f"two sites are called {name}; every site needs a name of its own."
            self._refuse(node, problem)
            raise Refused(problem)
        if self.found.get(name, node) != node:  # Flower notices the end of the node that it had some time later
            self.events.record(f"site {name} has started again")
        self.found[name], self.said[name] = node, answer

    def _refuse(self, node: int, reason: str) -> None:
        """Tell a site that it does not take part."""
        self.events.record(f"a site was refused: {reason}")
        if (number := self._sent(node, "refuse", Packet({"reason": reason}))) is not None:
            self._refusals.append(number)

    def _await_refusals(self) -> None:
        """Wait until sites have heard that they were refused: messages of a run that has ended do not arrive."""
        waiting, until = {*self._refusals}, time.monotonic() + REFUSAL_ARRIVES
        while waiting and time.monotonic() < until:
            waiting -= self.transport.receive(list(waiting)).keys()
            time.sleep(LOOK_AGAIN)

    def _refuse_strangers(self, roster: Sequence[str]) -> None:
        for name in [name for name in self.found if name not in roster]:
            self._refuse(self.found.pop(name), f"{name} is not in federation.sites ({', '.join(roster)[:200]}).")

    def ask(
        self, kind: Kind, requests: Iterable[tuple[str, Packet]], agree: Callable[[str], None] | None = None
    ) -> Iterator[Packet]:
        """The answers of these sites, in the same order; `agree` lets a site join again that has nothing of the run."""
        waiting = [_Request(name, packet) for name, packet in requests]
        answers: dict[str, Packet] = {}
        since = time.monotonic()
        position = 0
        while position < len(waiting):
            self._send(kind, waiting[position:], answers)
            self._tell(kind, waiting, position, answers)
            if self._fetch(waiting[position : position + WINDOW], answers):
                since = time.monotonic()
            name = waiting[position].name
            if name in answers:
                answer = answers.pop(name)
                if answer.facts.get(NOT_JOINED) and agree is not None and not waiting[position].joined_again:
                    agree(name)
                    waiting[position] = _Request(name, waiting[position].packet, joined_again=True)
                    continue
                yield _checked(name, answer)
                position, since = position + 1, time.monotonic()
                continue
            if time.monotonic() - since > self.patience:
                raise WorkersLost(f"site {name} has not answered for {self.patience:g} seconds.")
            time.sleep(LOOK_AGAIN)

    def _tell(self, kind: Kind, waiting: Sequence[_Request], position: int, answers: Collection[str]) -> None:
        missing = tuple(request.name for request in waiting[position:] if request.name not in answers)
        connected = tuple(sorted(self.found))
        self.watch(Activity(kind, len(waiting), len(waiting) - len(missing), missing, connected))

    def _send(self, kind: Kind, waiting: Sequence[_Request], answers: Collection[str]) -> None:
        if any(request.number is None for request in waiting):
            self._look()
        open_requests = sum(request.number is not None and request.name not in answers for request in waiting)
        for request in waiting:
            node = self.found.get(request.name)
            if request.number is None and node is not None and open_requests < self.at_once:
                open_requests += 1
                request.number, request.node = self._sent(node, kind, request.packet), node

    def _sent(self, node: int, kind: Kind, packet: Packet) -> str | None:
        try:
            return self.transport.send(node, kind, packet)
        except NotSent as error:
            self.events.record(f"a message could not be sent ({error}); it is sent again")
            return None

    def _fetch(self, waiting: Sequence[_Request], answers: dict[str, Packet]) -> bool:
        """Take what has come; a request whose answer is lost is sent again."""
        open_requests = {r.number: r for r in waiting if r.number is not None and r.name not in answers}
        came = self.transport.receive(list(open_requests)) if open_requests else {}
        for number, answer in came.items():
            request = open_requests[number]
            if isinstance(answer, Lost):
                self.events.record(f"site {request.name} was lost ({answer.reason}); it is asked again")
                request.number = None
                if self.found.get(request.name) == request.node:
                    del self.found[request.name]
                    self._known.discard(request.node)
            else:
                answers[request.name] = answer
        return any(isinstance(answer, Packet) for answer in came.values())


def _checked(name: str, answer: Packet) -> Packet:
    if PROBLEM in answer.facts:
        raise Refused(_problem(name, answer))
    return answer


def _problem(name: str, answer: Packet) -> str:
    site, problem = f"site {name}" if name else "a site", str(answer.facts[PROBLEM])
    return problem if name and site in problem else f"{site}: {problem}"
