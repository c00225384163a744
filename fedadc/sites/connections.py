"""Requests to sites by the names of their clients, over any transport. A site that was lost is asked again.

A transport reaches nodes, whose numbers mean nothing and may change when a site starts again. So every new node is
asked for its client's name.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedadc.engines.remote import NoAnswer
from fedadc.errors import FedadcError, WorkersLost, require
from fedadc.sites.journal import Journal
from fedadc.sites.node import require_file_name
from fedadc.sites.packets import PROBLEM, REFUSED, Kind, Lost, NotSent, Packet, require_same_versions, too_large
from fedadc.sites.status import JOIN, Activity

LOOK_AGAIN = 0.2  # seconds between two looks for answers
MOST_SAID = 500  # characters of what a site says
NAME_ONLY = Packet(most=1 << 16)  # a greeting without facts: a site says its name and its versions
HELLO_TAKES = 30.0  # seconds after which a node that has not said its name takes no place of others
REFUSAL_ARRIVES = 15.0  # seconds, at most


class Transport(Protocol):
    """Carries packets to nodes and back."""

    def nodes(self) -> Collection[int]:
        """The nodes that are connected."""
        ...

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        """Send a request, and return its number; `NotSent` if it may be tried again."""
        ...

    def key(self, node: int) -> bytes:
        """The public key with which a node has proven who it is, in PEM; empty: it has none."""
        ...

    def receive(self, numbers: Collection[str]) -> Mapping[str, Packet | Lost]:
        """Answers to these requests that have come; each is returned once."""
        ...


class Refused(FedadcError):
    """A site has refused a request."""


@dataclass(frozen=True)
class _Awaited:
    """A message whose answer nobody waits for; something is done with it when it comes."""

    name: str  # of the site
    node: int
    busy: bool  # whether the site is to be asked nothing else until it has answered
    done: Callable[[Packet | Lost], None]
    posted: bool = False
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Parcel:
    """A message that is sent when there is time for it."""

    name: str
    kind: Kind
    packet: Packet
    done: Callable[[Packet | Lost], None]


class SiteConnections:
    """Knows which node has which client."""

    def __init__(
        self,
        transport: Transport,
        patience: float,
        journal: Journal | None = None,  # is told what happens
        at_once: int | None = None,  # requests that are open at the same time; None: any number
        open: bool = False,  # whether sites may join later
        key_of: Callable[[str], bytes] | None = None,  # name of a site -> its public key, in PEM; None: any will do
    ) -> None:
        self.transport, self.patience, self.open = transport, patience, open
        self.journal = journal or Journal()
        self.key_of = key_of
        self.at_once = sys.maxsize if at_once is None else at_once
        self.hello = NAME_ONLY  # with which a new node is greeted
        self.said: dict[str, Packet] = {}  # client -> its answer to that
        self.found: dict[str, int] = {}  # client -> node
        self._asked: dict[int, tuple[str, float]] = {}  # node -> number of the request for its name, and since when
        self._known: set[int] = set()  # nodes that have said their names
        self.problems: list[tuple[str, str]] = []  # sites that cannot take part, and why
        self._refusals: list[str] = []  # numbers of messages to sites that were refused
        self._strict = True  # a site that cannot take part ends the run, until all were found
        self._joining = True  # until all sites were found
        self._collects = False  # problems are collected, and end nothing
        self.roster: tuple[str, ...] | None = None  # names of the sites that take part, once they are known
        self._awaited: dict[str, _Awaited] = {}  # by the number of the message
        self._outbox: list[_Parcel] = []
        self.bytes_down: Counter[str] = Counter()  # by the kind of message
        self.bytes_up: Counter[str] = Counter()

    def wait_for(
        self,
        wanted: Sequence[str] | int,
        enough: int | None = None,
        within: float | None = None,
        strict: bool = True,
    ) -> list[str]:
        """Wait until these sites, or so many, are connected; returns their names in order.

        If `enough` is given, that many will do after `within` seconds. Unless `strict`, a site that cannot take part is
        one that is not there.
        """
        self._strict = strict
        try:
            return self._wait_for(wanted, enough, self.patience if within is None else within)
        except FedadcError:
            self._await_refusals()
            raise

    def gather(self, wanted: Sequence[str] | int, within: float) -> list[str]:
        """The sites that are connected when all are, or after so many seconds. Problems are kept."""
        total, until = wanted if isinstance(wanted, int) else len(wanted), time.monotonic() + within
        self._collects = True
        while True:
            self.look()
            heard = {*self.found, *(name for name, _ in self.problems)}
            absent = () if isinstance(wanted, int) else tuple(name for name in wanted if name not in heard)
            self.journal.activity(Activity(JOIN, total, len(heard), absent, tuple(sorted(self.found))))
            if (len(heard) >= total and not absent) or time.monotonic() > until:
                return sorted(self.found)
            time.sleep(LOOK_AGAIN)

    def _wait_for(self, wanted: Sequence[str] | int, enough: int | None, within: float) -> list[str]:
        self.roster = None if isinstance(wanted, int) else tuple(wanted)
        began, total = time.monotonic(), wanted if isinstance(wanted, int) else len(wanted)
        while True:
            self.look()
            for name, problem in self.problems if self._strict else ():
                require(not isinstance(wanted, int) and name not in wanted, problem, Refused)
            names = sorted(self.found) if isinstance(wanted, int) else [name for name in wanted if name in self.found]
            absent = () if isinstance(wanted, int) else tuple(name for name in wanted if name not in self.found)
            self.journal.activity(Activity(JOIN, total, len(names), absent, tuple(sorted(self.found))))
            waited = time.monotonic() - began
            if len(names) >= total or (enough is not None and len(names) >= enough and waited > within):
                require(
                    not isinstance(wanted, int) or len(names) == wanted,
                    f"{len(names)} sites are connected, but federation.sites is {wanted}: {', '.join(names)}.",
                )
                self._joining, self.roster = False, self.roster or tuple(names)
                return names
            if waited > (self.patience if enough is None else max(self.patience, within)):
                those = f"site {', '.join(absent)}" if absent else f"{total - len(names)} of {total} sites"
                others = f"; {self.problems[0][1]}" if self.problems else "."
                raise WorkersLost(f"{those} did not connect within {waited:.0f} seconds{others}")
            time.sleep(LOOK_AGAIN)

    def look(self) -> None:
        """Ask new nodes for their names, forget those that are gone, and refuse what came too late."""
        nodes = set(self.transport.nodes())
        self._take_awaited(nodes)
        new, now = sorted(nodes - self._asked.keys() - self._known), time.monotonic()
        under_way = sum(now - since < HELLO_TAKES for _, since in self._asked.values())  # silent nodes hold up nobody
        for node in new[: max(0, self.at_once - under_way)]:
            if (number := self.sent("", node, "hello", self.hello)) is not None:
                self._asked[node] = number, now
        self._asked = {node: asked for node, asked in self._asked.items() if node in nodes}
        self._known &= nodes
        self.found = {name: node for name, node in self.found.items() if node in nodes}
        numbers = [number for number, _ in self._asked.values()]
        answers = self.transport.receive(numbers) if numbers else {}
        for node, (number, _) in list(self._asked.items()):
            answer = answers.get(number)
            if answer is None:
                continue
            del self._asked[node]
            if isinstance(answer, Lost):
                continue
            self._known.add(node)
            self._add(str(answer.facts.get("client", "")), node, answer)
        if self.roster is not None and not self.open:
            self._refuse_strangers(self.roster)

    def _add(self, name: str, node: int, answer: Packet) -> None:
        nameless = not name and PROBLEM in answer.facts  # a site whose app fails cannot say its name
        if not nameless and (wrong := self._wrong_with(name, node, answer)) is not None:
            self._refuse("", node, wrong)
            return
        if PROBLEM in answer.facts:
            problem = problem_of(name, answer)
            if name or self.key_of is None:
                self.problems.append((name, problem))
            self.journal.happened("refused", f"a site cannot take part: {problem}", name)
            return
        if self.found.get(name, node) != node and self._joining and (self._strict or self._collects):
            problem = f"two sites are called {name}; every site needs a name of its own."
            self._refuse(name, node, problem)
            if not self._collects:
                raise Refused(problem)
            self.problems.append((name, problem))
            return
        if self.found.get(name, node) != node:  # Flower notices the end of the node that it had some time later
            self.journal.happened("returned", f"site {name} has started again", name)
        self.found[name] = node
        if self._joining:
            self.said[name] = answer

    def _wrong_with(self, name: str, node: int, answer: Packet) -> str | None:
        """Why a node cannot have a name, or cannot take part; None: it can."""
        try:
            require_file_name(name, "the name of a site")
            if self.key_of is not None:
                known = self.transport.key(node) == self.key_of(name)
                require(known, f"its key is not that of site {name} (site-keys).")
            if not self._joining:  # while sites are found, versions are compared once all of them are there
                require_same_versions(name, answer)
        except FedadcError as error:
            return str(error)
        return None

    def _refuse(self, name: str, node: int, reason: str) -> None:
        """Tell a site that it does not take part."""
        self.journal.happened("refused", f"a site was refused: {reason}", name)
        if (number := self.sent(name, node, "refuse", Packet({"reason": reason}))) is not None:
            self._refusals.append(number)

    def _await_refusals(self) -> None:
        """Wait until sites have heard that they were refused: messages of a run that has ended do not arrive."""
        waiting, until = {*self._refusals}, time.monotonic() + REFUSAL_ARRIVES
        while waiting and time.monotonic() < until:
            waiting -= self.transport.receive(list(waiting)).keys()
            time.sleep(LOOK_AGAIN)

    def newcomers(self) -> list[str]:
        """Sites that are connected and wish to join, and do not owe an answer."""
        return sorted(self.found.keys() - set(self.roster or ()) - self.busy)

    def turn_away(self, name: str, reason: str) -> None:
        """Refuse a site that wishes to join."""
        self._refuse(name, self.found.pop(name), reason)

    def _refuse_strangers(self, roster: Sequence[str]) -> None:
        for name in [name for name in self.found if name not in roster]:
            self._refuse(name, self.found.pop(name), f"{name} is not in federation.sites ({', '.join(roster)[:200]}).")

    def sent(self, name: str, node: int, kind: Kind, packet: Packet) -> str | None:
        """Send a message; None: it could not be sent just now."""
        try:
            number = self.transport.send(node, kind, packet)
        except NotSent as error:
            self.journal.happened("waiting", f"a message could not be sent ({error}); it is sent again", name)
            return None
        self.bytes_down[kind] += packet.size
        if name:
            self.journal.sent(name, packet.size)
        return number

    def received(self, name: str, kind: Kind, answer: Packet, most: int) -> Packet:
        """Count an answer that has come; one that is too large is refused."""
        self.bytes_up[kind] += answer.size
        self.journal.received(name, answer.size)
        return answer if answer.size <= most else Packet({REFUSED: too_large(most)})

    def forget(self, name: str, node: int, reason: str) -> None:
        """A message to a node was lost; the site is found again when it answers as this node or as another."""
        self.journal.happened("lost", f"site {name} was lost ({reason}); it is asked again", name)
        if self.found.get(name) == node:
            del self.found[name]
            self._known.discard(node)

    def refuse_later(self, messages: Mapping[str, int], name: str, what: str, late: bool) -> None:
        """Refuse the answers to these messages (number -> node) whenever they come; until then, a late site is busy."""

        def refuse(answer: Packet | Lost) -> None:
            if isinstance(answer, Packet):
                came = " came too late and" if late else ""
                self.journal.happened("refused", f"{what} of site {name}{came} is refused", name)

        self._awaited |= {number: _Awaited(name, node, late, refuse) for number, node in messages.items()}

    @property
    def busy(self) -> set[str]:
        """Sites that are still at work on something that is no longer waited for."""
        return {awaited.name for awaited in self._awaited.values() if awaited.busy}

    def absent(self, name: str) -> NoAnswer:
        """Why a site cannot be asked now."""
        if name in self.busy:
            return NoAnswer("it is still busy with an earlier round")
        unasked = "it was not asked: there was no place among those that work at once (federation.at_once)"
        return NoAnswer(unasked if name in self.found else "it is not connected")

    def post(self, name: str, kind: Kind, packet: Packet, done: Callable[[Packet | Lost], None]) -> None:
        """Send a message when there is time for it, and go on. A site that is not connected does not get it."""
        self._outbox.append(_Parcel(name, kind, packet, done))

    @property
    def outgoing(self) -> set[str]:
        """Sites to which posted messages are not sent yet."""
        return {parcel.name for parcel in self._outbox}

    def has_post(self, name: str) -> bool:
        """Whether a message was posted to a site that it has not answered; then it is sent no further one."""
        return name in self.outgoing or any(a.posted and a.name == name for a in self._awaited.values())

    def send_posted(self, most: int) -> None:
        """Send what was posted, if not more than `most` messages are under way; silent sites take no place for long."""
        now, busy = time.monotonic(), self.busy
        most -= sum(now - awaited.since < HELLO_TAKES for awaited in self._awaited.values())
        for parcel in [parcel for parcel in self._outbox if parcel.name not in busy][: max(0, most)]:
            self._outbox.remove(parcel)
            node = self.found.get(parcel.name)
            number = None if node is None else self.sent(parcel.name, node, parcel.kind, parcel.packet)
            if node is None or number is None:
                parcel.done(Lost("it could not be sent"))
            else:
                self._awaited[number] = _Awaited(parcel.name, node, False, parcel.done, posted=True)

    def _take_awaited(self, nodes: Collection[int]) -> None:
        came = self.transport.receive(list(self._awaited)) if self._awaited else {}
        gone = {number: Lost("the node is gone") for number, a in self._awaited.items() if a.node not in nodes}
        for number, answer in {**gone, **came}.items():
            self._awaited.pop(number).done(answer)


def said_plainly(text: object) -> str:
    """What a site says, as a part of a line: without line breaks and control characters, and not too long."""
    words = " ".join(str(text).split())[:MOST_SAID]
    return words if words.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)


def problem_of(name: str, answer: Packet) -> str:
    site, problem = f"site {name}" if name else "a site", said_plainly(answer.facts[PROBLEM])
    return problem if name and site in problem else f"{site}: {problem}"
