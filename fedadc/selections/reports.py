"""What clients tell the server about their labels, and what a cohort lacks by it.

Cohorts come as columns: [size, cohorts]. What they lack comes as [cohorts, ...], all zeros where nothing is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from fedadc.data.dataset import Array

Reports = Literal["histograms", "classes"]
ONES = np.array([i.bit_count() for i in range(256)], dtype=np.uint8)  # set bits of a byte


class KnownLabels(Protocol):
    """What the server keeps of the reports."""

    @property
    def clients(self) -> int: ...

    @property
    def cells(self) -> int:
        """Numbers kept of a client: what looking at one costs."""

    def lacking(self, cohorts: Array) -> Array: ...


@dataclass(frozen=True)
class ReportedClasses:
    """A bit for every class that a client does not hold, so that a union is an `and` and unused bits are zero."""

    lacks: Array  # uint64 [clients, words]

    @staticmethod
    def of(held: Array) -> ReportedClasses:
        """From a table [clients, classes], true where a client holds a class."""
        octets = np.packbits(~held, axis=1)
        return ReportedClasses(np.pad(octets, ((0, 0), (0, -octets.shape[1] % 8))).view(np.uint64))

    @property
    def clients(self) -> int:
        return len(self.lacks)

    @property
    def cells(self) -> int:
        return int(self.lacks.shape[1])

    def lacking(self, cohorts: Array) -> Array:
        return np.asarray(np.bitwise_and.reduce(self.lacks[cohorts], axis=0))


@dataclass(frozen=True)
class ReportedCounts:
    """Samples of each class, as far as they are needed: no more than `at_least` of one client's can matter."""

    capped: Array  # [clients, classes]
    at_least: int

    @staticmethod
    def of(counts: Array, at_least: int) -> ReportedCounts:
        return ReportedCounts(np.minimum(counts, at_least).astype(np.min_scalar_type(at_least)), at_least)

    @property
    def clients(self) -> int:
        return len(self.capped)

    @property
    def cells(self) -> int:
        return int(self.capped.shape[1])

    def lacking(self, cohorts: Array) -> Array:
        return np.asarray(self.capped[cohorts].sum(axis=0, dtype=np.int64) < self.at_least)


def missing(lacking: Array) -> Array:
    """How many classes each cohort lacks."""
    return ones(np.ascontiguousarray(lacking))


def ones(words: Array) -> Array:
    """Set bits of each row."""
    return np.asarray(ONES[words.view(np.uint8)].sum(axis=-1, dtype=np.int64))
