"""Bytes of a round, by what they were. Vectors are counted; numbers such as the round or the learning rate are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fedadc.models.vectors import State

Bytes = dict[str, int]  # by name


@dataclass(frozen=True)
class Ledger:
    """What traveled in one round, over all clients."""

    up: Bytes = field(default_factory=dict)
    down: Bytes = field(default_factory=dict)
    ahead: Bytes = field(default_factory=dict)  # also down: for the next cohort, while this one computes

    @property
    def bytes_up(self) -> int:
        return sum(self.up.values())

    @property
    def bytes_down(self) -> int:
        return sum(self.down.values()) + sum(self.ahead.values())

    def record(self) -> dict[str, Bytes]:
        """As a line of metrics.jsonl has it."""
        return {name: dict(entry) for name, entry in vars(self).items() if entry}


def sizes(vectors: State) -> Bytes:
    return {name: v.numel() * v.element_size() for name, v in vectors.items()}


def times(count: int, each: Mapping[str, int]) -> Bytes:
    """The same sent to so many; what nobody was sent goes unmentioned."""
    return {name: count * size for name, size in each.items() if count * size}


def total(entries: Iterable[Mapping[str, int]]) -> Bytes:
    """Summed by name."""
    result: Bytes = {}
    for entry in entries:
        for name, size in entry.items():
            result[name] = result.get(name, 0) + size
    return result
