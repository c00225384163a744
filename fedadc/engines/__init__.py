"""Where clients run. An engine maps `local_update` over the orders of a round and yields their parts in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedadc.engines.inprocess import InProcess
from fedadc.evaluate import Cut, Tally
from fedadc.federation.aggregate import Part
from fedadc.federation.local import Broadcast, Order
from fedadc.methods.base import Vector


class Engine(Protocol):
    def run(self, broadcast: Broadcast, orders: Sequence[Order]) -> Iterator[Part]:
        """Train each client; a part's sum is there until the next part is asked for."""
        ...

    def measure(self, theta: Vector, cuts: Sequence[Cut]) -> Iterator[Tally]:
        """Count what a model says on each cut, in order."""
        ...

    def take_events(self) -> tuple[str, ...]:
        """What happened since the last time that a user should know."""
        ...

    def close(self) -> None:
        """Let go of processes and memory; the engine may be used again."""
        ...


__all__ = ["Engine", "InProcess"]
