"""Clients one after another in this process: breakpoints work and tracebacks are whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedadc.exact import exact
from fedadc.federation.local import Order, Report, Workplace, local_update


@dataclass(frozen=True)
class InProcess:
    workplace: Workplace

    def run(self, orders: Iterable[Order]) -> Iterator[Report]:
        for order in orders:
            with exact():
                report = local_update(self.workplace, order)
            yield report
