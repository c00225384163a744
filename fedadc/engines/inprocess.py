"""Clients one after another in this process: breakpoints work and tracebacks are whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedadc.federation.local import Broadcast, Order, Report, Workplace, local_update


@dataclass(frozen=True)
class InProcess:
    workplace: Workplace

    def run(self, broadcast: Broadcast, orders: Iterable[Order]) -> Iterator[Report]:
        for order in orders:
            yield local_update(self.workplace, broadcast, order)
