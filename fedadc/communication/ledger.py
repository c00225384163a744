"""The ledger: bytes sent in a round, by name. Vectors count; numbers such as the round or the learning rate do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fedadc.models.vectors import State

Bytes = dict[str, int]  # bytes by name of the vector


@dataclass(frozen=True)
class Ledger:
    """The bytes sent in one round, summed over all clients."""

    up: Bytes = field(default_factory=dict)  # from clients to the server
    down: Bytes = field(default_factory=dict)  # from the server to clients
    ahead: Bytes = field(default_factory=dict)  # also downloads: to the next cohort, while this one computes

    @property
    def bytes_up(self) -> int:
        return sum(self.up.values())

    @property
    def bytes_down(self) -> int:
        return sum(self.down.values()) + sum(self.ahead.values())

    def record(self) -> dict[str, Bytes]:
        """The ledger as it is written to metrics.jsonl; empty entries are omitted."""
        return {name: dict(entry) for name, entry in vars(self).items() if entry}


def sizes(vectors: State) -> Bytes:
    """The bytes of each vector."""
    return {name: v.numel() * v.element_size() for name, v in vectors.items()}


def times(count: int, each: Mapping[str, int]) -> Bytes:
    """The bytes of the same message sent `count` times; names with 0 bytes are omitted."""
    return {name: count * size for name, size in each.items() if count * size}


def total(entries: Iterable[Mapping[str, int]]) -> Bytes:
    """The sum of all entries, by name."""
    result: Bytes = {}
    for entry in entries:
        for name, size in entry.items():
            result[name] = result.get(name, 0) + size
    return result
