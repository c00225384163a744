"""Where clients run. An engine maps `local_update` over the orders of a round and yields reports in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from fedadc.engines.inprocess import InProcess
from fedadc.evaluate import Cut, Tally
from fedadc.federation.local import Broadcast, Order, Report
from fedadc.methods.base import Vector


class Engine(Protocol):
    def run(self, broadcast: Broadcast, orders: Iterable[Order]) -> Iterator[Report]:
        """Train each client; an upload is there until the next report is asked for."""
        ...

    def measure(self, theta: Vector, cuts: Sequence[Cut]) -> Iterator[Tally]:
        """Count what a model says on each cut, in order."""
        ...

    def close(self) -> None:
        """Let go of processes and memory; the engine may be used again."""
        ...


__all__ = ["Engine", "InProcess"]
