"""Where clients run. An engine maps `local_update` over the orders of a round and yields reports in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from fedadc.engines.inprocess import InProcess
from fedadc.federation.local import Broadcast, Order, Report


class Engine(Protocol):
    def run(self, broadcast: Broadcast, orders: Iterable[Order]) -> Iterator[Report]: ...


__all__ = ["Engine", "InProcess"]
