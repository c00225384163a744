"""Clients elsewhere: an engine that passes bytes to them and reads the bytes that come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fedadc.engines.pooled import EventLog
from fedadc.errors import FedadcError, one_line
from fedadc.models.vectors import State
from fedadc.training.aggregate import PartialSum, received
from fedadc.training.agreement import Agreement
from fedadc.training.messages import ClientResult, ClientTask, ServerBroadcast
from fedadc.training.wire import Wire


@dataclass(frozen=True)
class NoAnswer:
    """No answer came, or none that is accepted, and why."""

    reason: str
    kind: Literal["late", "problem", "refused"] = "late"  # problem: the client says so; refused: it cannot be accepted


Exchange = Callable[[Sequence[tuple[int, bytes]]], Iterator[bytes | NoAnswer | None]]


@dataclass
class Remote:
    """Runs the clients' half of a round wherever `exchange` carries the messages.

    `exchange` gets (client, message) of each client and yields their answers in the same order; None or `NoAnswer`:
    none came. A client without an answer, or with one that cannot be read, is dropped from the round.
    """

    agreement: Agreement
    exchange: Exchange
    write: Callable[[ServerBroadcast, ClientTask], bytes] | None = (
        None  # the message of a task; None: `Wire.write_task`
    )
    leave_out: Callable[[int, str, bytes | NoAnswer | None], None] | None = None  # is told a client, why, its answer
    _events: EventLog = field(default_factory=EventLog)

    def __post_init__(self) -> None:
        self._wire = Wire(self.agreement)

    @property
    def largest_answer(self) -> int:
        """Bytes of an answer, at most."""
        return self._wire.largest_result

    def run(
        self, broadcast: ServerBroadcast, tasks: Sequence[ClientTask], states: Mapping[int, State]
    ) -> Iterator[PartialSum]:
        """Train each client. Their states are with them; here `states` only says in which round each was counted."""
        write = self.write or self._wire.write_task
        messages = [(task.client, write(broadcast, task)) for task in tasks]
        for task, answer in zip(tasks, self.exchange(messages), strict=True):
            try:
                if not isinstance(answer, bytes):
                    raise FedadcError("no answer came" if answer is None else answer.reason)
                result, keeps_state = self._wire.read_result(answer, broadcast.round, task)
                part = self._read(result, task.weight)
            except FedadcError as error:
                self._left_out(broadcast.round, task.client, one_line(error), answer)
                continue
            if not part.reports[0].finite:
                self._left_out(broadcast.round, task.client, "its update is not finite, or too large", answer)
            yield PartialSum(part.sum, [replace(part.reports[0], state=None if keeps_state else {})])

    def is_usable(self, answer: bytes, round: int, task: ClientTask) -> bool:
        """Whether an answer could be read and would count."""
        try:
            return self._read(self._wire.read_result(answer, round, task)[0], task.weight).reports[0].finite
        except FedadcError:
            return False

    def _left_out(self, round: int, client: int, reason: str, answer: bytes | NoAnswer | None) -> None:
        if self.leave_out is not None:
            self.leave_out(client, reason, answer)
        else:
            self._events.record(f"round {round}, client {client}: {reason}; it is left out")

    def _read(self, result: ClientResult, weight: float) -> PartialSum:
        try:
            return received(self.agreement, result, weight)
        except (RuntimeError, IndexError, ValueError) as error:  # such as positions outside the vector
            raise FedadcError(f"its upload cannot be read ({one_line(error)})") from error

    def take_events(self) -> tuple[str, ...]:
        """Events since the last call that a user should know."""
        return self._events.take()
