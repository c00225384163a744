"""Requests to several sites at once, whose answers are read in order. A site that was lost is asked again.

Without limits, every answer is waited for. With limits, the waiting ends at a deadline if enough sites have answered.
An answer that comes after it is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fedadc.engines.remote import NoAnswer
from fedadc.errors import FedadcError, WorkersLost, require
from fedadc.sites.connections import LOOK_AGAIN, Refused, SiteConnections, problem_of, said_plainly
from fedadc.sites.packets import NEEDS_STATE, NOT_JOINED, PROBLEM, REFUSED, Kind, Lost, Packet
from fedadc.sites.status import Activity

WINDOW = 8  # answers that are fetched ahead of their turn where all are waited for
BEFORE_RETRY = 5.0  # seconds until sites whose answers did not count are asked again, if all others have answered
LEAST = 0.2  # seconds in which a site may agree again, however little of a round is left


@dataclass(frozen=True)
class Limits:
    """How long answers are waited for, and how many are needed."""

    deadline: float  # seconds from the first message
    quorum: int  # answers that are needed when it has passed
    retries: int = 0  # how often those that have not answered are asked again, with a new deadline


@dataclass
class _Request:
    name: str
    packet: Packet
    numbers: dict[str, int] = field(default_factory=dict)  # of its messages -> node; empty: it is not sent
    sent_at: float = 0.0  # when the last of them was sent
    times: int = 0  # how often it was sent
    send_again: bool = False
    joined_again: bool = False
    sent_whole: bool = False

    @property
    def is_due(self) -> bool:
        return not self.numbers or self.send_again


def share_of(many: int, share: float) -> int:
    """A share of so many, rounded up, and at least 1."""
    return max(1, math.ceil(share * many - 1e-9))


def ask(
    connections: SiteConnections,
    kind: Kind,
    requests: Iterable[tuple[str, Packet]],
    agree: Callable[[str, float | None], None] | None = None,
) -> Iterator[Packet]:
    """The answers of all these sites, in the same order, however long they take."""
    for answer in Requests(connections, kind, requests, agree, strict=True).answers():
        assert isinstance(answer, Packet)
        yield answer


class Requests:
    """Requests of one kind, one to a site. `agree` lets a site join again that has nothing of the run."""

    def __init__(
        self,
        connections: SiteConnections,
        kind: Kind,
        requests: Iterable[tuple[str, Packet]],
        agree: Callable[[str, float | None], None] | None = None,  # given a site, and seconds at most
        limits: Limits | None = None,
        subject: str = "answer",  # what a site that is late would have sent
        whole: Callable[[Packet], Packet] | None = None,  # the same request for a site that lacks a state
        strict: bool = False,  # an answer that cannot be accepted ends the run
        usable: Callable[[str, Packet], bool] | None = None,  # whether an answer counts for the quorum; None: any does
    ) -> None:
        self.connections, self.kind, self.agree, self.limits = connections, kind, agree, limits
        self.waiting = [_Request(name, packet) for name, packet in requests]
        self.subject, self.whole, self.strict, self.usable = subject, whole, strict, usable
        self._came: dict[str, Packet] = {}  # answers whose turn has not come
        self._bad: set[str] = set()  # sites whose answers do not count; they are asked again while there are retries
        self._good: set[str] = set()  # sites whose answers count
        self._over = False  # no more answers are waited for
        self._tries = 0 if limits is None else limits.retries
        self._began = self._last = time.monotonic()

    def answers(self) -> Iterator[Packet | NoAnswer]:
        """The answers in the order of the requests; without limits, no `NoAnswer` is among them."""
        position = 0
        while position < len(self.waiting):
            request = self.waiting[position]
            self._send(position)
            self._tell(position)
            self._fetch(self.waiting[position:] if self.limits else self.waiting[position : position + WINDOW])
            if request.name in self._came and not self._may_be_asked_again(request.name):
                answer = self._accepted(request)
            elif self._is_over(position):
                answer = self._given_up(request)
            else:
                self._require_patience(request)
                time.sleep(LOOK_AGAIN)
                continue
            if answer is not None:
                yield answer
                position, self._last = position + 1, time.monotonic()

    def _tell(self, position: int) -> None:
        missing = tuple(request.name for request in self.waiting[position:] if request.name not in self._came)
        many, connected = len(self.waiting), tuple(sorted(self.connections.found))
        self.connections.journal.activity(Activity(self.kind, many, many - len(missing), missing, connected))

    def _send(self, position: int) -> None:
        waiting = [request for request in self.waiting[position:] if request.name not in self._came]
        now, due = time.monotonic(), [request for request in waiting if request.is_due]
        under_way = sum(not request.is_due and now - request.sent_at < self._place_takes for request in waiting)
        if due and not self._over:
            self.connections.look()
        not_now = self.connections.busy | self.connections.outgoing
        for request in sorted(due, key=lambda request: request.times):  # those that were never asked come first
            node = self.connections.found.get(request.name)
            ready = request.name not in not_now and not self._over
            if ready and node is not None and under_way < self.connections.at_once:
                under_way += 1
                request.times, request.sent_at = request.times + 1, time.monotonic()
                if (number := self.connections.sent(request.name, node, self.kind, request.packet)) is not None:
                    request.numbers[number], request.send_again = node, False
        self.connections.send_posted(self.connections.at_once - under_way)

    @property
    def _place_takes(self) -> float:
        """Seconds after which a site that has not answered takes no place of others, so that all are asked in time."""
        if self.limits is None:
            return math.inf
        return self.limits.deadline / max(1, math.ceil(len(self.waiting) / self.connections.at_once))

    def _fetch(self, waiting: Sequence[_Request]) -> None:
        """Take what has come; a request whose answer is lost is sent again."""
        open_requests = {n: r for r in waiting for n in r.numbers if r.name not in self._came}
        came = self.connections.transport.receive(list(open_requests)) if open_requests else {}
        for number, answer in came.items():
            request = open_requests[number]
            node = request.numbers.pop(number)
            if isinstance(answer, Lost):
                self.connections.forget(request.name, node, answer.reason)
                continue
            self._last = time.monotonic()
            answer = self.connections.received(request.name, self.kind, answer, request.packet.most)
            if request.name in self._came:
                self.connections.journal.happened(
                    "refused", f"a second {self._subject_of(request)} is refused", request.name
                )
                continue
            self._came[request.name] = answer
            said_no = bool({PROBLEM, REFUSED} & answer.facts.keys())
            counts = not said_no and (self.usable is None or self.usable(request.name, answer))
            (self._good if counts else self._bad).add(request.name)

    def _subject_of(self, request: _Request) -> str:
        return f"{self.subject} of site {request.name}"

    def _may_be_asked_again(self, name: str) -> bool:
        """Whether an answer does not count, and the site may be asked again because too few do."""
        answer = self._came[name]
        if self.limits is None or self._over or name not in self._bad or not self._tries:
            return False
        asks_for_more = bool({NOT_JOINED, NEEDS_STATE} & answer.facts.keys())
        return not asks_for_more and len(self._good) < self.limits.quorum

    def _accepted(self, request: _Request) -> Packet | NoAnswer | None:
        """An answer whose turn has come; None: the site is asked again."""
        answer = self._came.pop(request.name)
        self._bad.discard(request.name)
        self.connections.refuse_later(request.numbers, request.name, f"a second {self.subject}", late=False)
        try:
            if answer.facts.get(NOT_JOINED) and self.agree is not None and not request.joined_again:
                self.agree(request.name, self._time_left())
                request.numbers, request.joined_again = {}, True
                return None
            if answer.facts.get(NEEDS_STATE) and self.whole is not None and not request.sent_whole:
                request.packet, request.numbers, request.sent_whole = self.whole(request.packet), {}, True
                return None
            if (refused := answer.facts.get(REFUSED)) is not None:
                require(not self.strict, f"site {request.name}: {said_plainly(refused)}.", Refused)
                return NoAnswer(said_plainly(refused), "refused")
            if PROBLEM in answer.facts:
                raise Refused(problem_of(request.name, answer))
        except FedadcError as error:
            if self.limits is None:
                raise
            return NoAnswer(str(error), "problem")
        return answer

    def _time_left(self) -> float | None:
        """Seconds until the deadline; None: there is none."""
        if self.limits is None:
            return None
        return max(LEAST, self.limits.deadline - (time.monotonic() - self._began))

    def _is_over(self, position: int) -> bool:
        """Whether enough answers have come, and the rest are late or busy with an earlier round."""
        if self.limits is None or self._over:
            return self._over
        passed, deadline = time.monotonic() - self._began, self.limits.deadline
        left = [request for request in self.waiting[position:] if request.name not in self._came]
        if passed <= deadline and not all(request.name in self.connections.busy for request in left):
            return False
        self._fetch(self.waiting[position:])
        self._over = len(self._good) >= self.limits.quorum
        if not self._over and passed > (min(BEFORE_RETRY, deadline) if self._bad else deadline):
            self._try_again(position)
        return self._over and self.waiting[position].name not in self._came

    def _try_again(self, position: int) -> None:
        assert self.limits is not None
        left = [r for r in self.waiting[position:] if r.name not in self._came or r.name in self._bad]
        missing = ", ".join(request.name for request in left[:3]) + (", ..." if len(left) > 3 else "")
        found = f"{len(self._good)} of {len(self.waiting)} sites have sent their {self.subject} within "
        found += f"{self.limits.deadline:g} seconds, not {missing}; {self.limits.quorum} are needed"
        if not self._tries:
            raise WorkersLost(f"{found}.")
        self._tries -= 1
        self.connections.journal.happened("waiting", f"{found}; the others are asked again")
        for request in left:
            request.send_again = True
            if (answer := self._came.pop(request.name, None)) is not None:
                self._bad.discard(request.name)
                self._note_again(request, answer)
        self._began = time.monotonic()

    def _note_again(self, request: _Request, answer: Packet) -> None:
        """An answer that did not count is in the journal, although the site is asked again."""
        reason = answer.facts.get(PROBLEM, answer.facts.get(REFUSED, "it cannot be used"))
        text = f"{self._subject_of(request)}: {said_plainly(reason)}; it is asked again"
        self.connections.journal.happened("problem" if PROBLEM in answer.facts else "refused", text, request.name)

    def _given_up(self, request: _Request) -> NoAnswer:
        assert self.limits is not None
        self.connections.refuse_later(request.numbers, request.name, f"the {self.subject}", late=True)
        if request.numbers:
            return NoAnswer(f"it has not answered within {self.limits.deadline:g} seconds")
        return self.connections.absent(request.name)

    def _require_patience(self, request: _Request) -> None:
        patience = self.connections.patience
        if self.limits is None and time.monotonic() - self._last > patience:
            raise WorkersLost(f"site {request.name} has not answered for {patience:g} seconds.")
