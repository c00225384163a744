"""What clients report to the server about their labels, and which classes a cohort lacks according to the reports.

Cohorts are passed as columns, [size, cohorts]. What they lack is returned as [cohorts, ...], all zeros for a cohort
that lacks no class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from fedadc.data.dataset import Array

Reports = Literal["histograms", "classes"]
ONES = np.array([i.bit_count() for i in range(256)], dtype=np.uint8)  # the number of set bits of each byte


class KnownLabels(Protocol):
    """What the server stores of the clients' reports."""

    @property
    def clients(self) -> int: ...

    @property
    def cells(self) -> int:
        """The numbers stored per client: the cost of examining one client."""

    def lacking(self, cohorts: Array) -> Array:
        """What each cohort lacks, [cohorts, ...]."""


@dataclass(frozen=True)
class ReportedClasses:
    """One bit per client and class, set if the client lacks it. A cohort lacks the bitwise AND of its clients' bits."""

    lacks: Array  # uint64 [clients, words]

    @staticmethod
    def of(held: Array) -> ReportedClasses:
        """From an array [clients, classes] that is true where a client holds a class."""
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
    """Samples per client and class, capped at `at_least`, because more of them make no difference."""

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
    """The number of classes that each cohort lacks."""
    return ones(np.ascontiguousarray(lacking))


def ones(words: Array) -> Array:
    """The number of set bits in each row."""
    return np.asarray(ONES[words.view(np.uint8)].sum(axis=-1, dtype=np.int64))
