"""Clients whose label proportions are drawn from a Dirichlet distribution (section IV-C of the paper)."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedadc.data.dataset import Array, Clients
from fedadc.errors import require
from fedadc.partitions.base import Partition


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """One Dir(alpha) vector per client over the classes (section IV-C); a smaller alpha gives more skew.

    Every class is divided among clients in proportion to their entries for it, with cumulative shares rounded; clients
    differ in size. An empty client takes one sample from the largest client (docs/deviations.md, 6).
    """

    needs_classes: ClassVar[bool] = True

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.alpha < math.inf, f"alpha must be positive and finite, not {self.alpha}.")

    def owners(self, labels: Array, classes: int, clients: int, rng: np.random.Generator) -> Array:
        draws = rng.standard_gamma(self.alpha, size=(clients, classes))
        underflow = draws.sum(axis=1) == 0  # at a tiny alpha; in the limit, all weight is on one class
        draws[underflow, rng.integers(classes, size=int(underflow.sum()))] = 1
        draws /= draws.sum(axis=1, keepdims=True)
        draws[:, draws.sum(axis=0) == 0] = 1  # a class without weight at any client is spread evenly
        owner = np.empty(len(labels), dtype=np.int64)
        samples = rng.permutation(len(labels))
        samples = samples[np.argsort(labels[samples], kind="stable")]
        ends = np.cumsum(np.bincount(labels, minlength=classes))
        for c, end in enumerate(ends):
            members = samples[(ends[c - 1] if c else 0) : end]
            share = np.cumsum(draws[:, c])
            cuts = np.rint(share / share[-1] * len(members)).astype(np.int64)
            owner[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
        return _fill_empty(owner, clients)


def _fill_empty(owner: Array, clients: int) -> Array:
    """Move one sample to every empty client, each from the client that is the largest at that moment."""
    sizes = np.bincount(owner, minlength=clients)
    empty = np.flatnonzero(sizes == 0)
    if len(empty) == 0:
        return owner
    heap = [(-int(size), k) for k, size in enumerate(sizes) if size > 1]
    heapq.heapify(heap)
    donors = np.empty(len(empty), dtype=np.int64)
    for position in range(len(empty)):
        negative, donor = heap[0]
        heapq.heapreplace(heap, (negative + 1, donor))
        donors[position] = donor
    before = Clients.from_owner(owner, clients)
    order = np.argsort(donors, kind="stable")
    nth = np.arange(len(donors)) - np.searchsorted(donors[order], donors[order])  # a donor's nth sample
    owner[before.indices[before.offsets[donors[order]] + nth]] = empty[order]
    return owner
