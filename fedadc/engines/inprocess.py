"""Clients one after another in this process: breakpoints work and tracebacks are whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedadc.evaluate import Cut, Examiner, Tally
from fedadc.exact import exact
from fedadc.federation.aggregate import Part
from fedadc.federation.local import Broadcast, Order, Workplace, local_update
from fedadc.methods.base import Vector


@dataclass(frozen=True)
class InProcess:
    place: Workplace
    examiner: Examiner

    def run(self, broadcast: Broadcast, orders: Sequence[Order]) -> Iterator[Part]:
        for order in orders:
            try:
                report = local_update(self.place, broadcast, order)
            except Exception as error:
                error.add_note(f"in round {broadcast.round}, client {order.client}")
                raise
            yield Part.of(report, self.place.method.tracked)

    def measure(self, theta: Vector, cuts: Sequence[Cut]) -> Iterator[Tally]:
        with exact():
            yield from (self.examiner.tally(theta, cut) for cut in cuts)

    def take_events(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        pass
