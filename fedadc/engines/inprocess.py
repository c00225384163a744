"""Clients one after another in this process: breakpoints work and tracebacks are whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fedadc.evaluate import Cut, Examiner, Tally
from fedadc.exact import exact
from fedadc.federation.local import Broadcast, Order, Report, Workplace, local_update
from fedadc.methods.base import Vector


@dataclass(frozen=True)
class InProcess:
    place: Workplace
    examiner: Examiner

    def run(self, broadcast: Broadcast, orders: Iterable[Order]) -> Iterator[Report]:
        for order in orders:
            yield local_update(self.place, broadcast, order)

    def measure(self, theta: Vector, cuts: Sequence[Cut]) -> Iterator[Tally]:
        with exact():
            yield from (self.examiner.tally(theta, cut) for cut in cuts)

    def close(self) -> None:
        pass
