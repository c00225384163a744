"""Clients elsewhere: an engine that passes bytes to them and reads the bytes that come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fedadc.errors import FedadcError, one_line
from fedadc.models.vectors import State
from fedadc.training.aggregate import PartialSum, received
from fedadc.training.agreement import Agreement
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.wire import Wire

Exchange = Callable[[Sequence[tuple[int, bytes]]], Iterator[bytes]]  # (client, message) -> answers, in the same order


@dataclass
class Remote:
    """Runs the clients' half of a round wherever `exchange` carries the messages."""

    agreement: Agreement
    exchange: Exchange

    def __post_init__(self) -> None:
        self._wire = Wire(self.agreement)

    def run(
        self, broadcast: ServerBroadcast, tasks: Sequence[ClientTask], states: Mapping[int, State]
    ) -> Iterator[PartialSum]:
        """Train each client. Their states are with them; here `states` only says in which round each was counted."""
        messages = [(task.client, self._wire.write_task(broadcast, task)) for task in tasks]
        for task, answer in zip(tasks, self.exchange(messages), strict=True):
            result, keeps_state = self._wire.read_result(answer, broadcast.round, task)
            try:
                part = received(self.agreement, result, task.weight)
            except (RuntimeError, IndexError, ValueError) as error:  # such as positions outside the vector
                raise FedadcError(f"client {task.client}: its upload cannot be read ({one_line(error)}).") from error
            report = replace(part.reports[0], state=None if keeps_state else {})
            yield PartialSum(part.sum, (report,))
