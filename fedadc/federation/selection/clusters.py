"""Cohorts drawn across clusters of clients with similar labels (section IV-E)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import require
from fedadc.federation.selection.base import Chooser, Selection
from fedadc.federation.selection.reports import Reports

SAMPLE = 20_000  # clients among whom centres are sought
ITERATIONS = 100
CELLS = 2**20  # numbers compared with a centre at once


@dataclass(frozen=True, kw_only=True)
class Clusters(Selection):
    """As many clients from each cluster of similar label histograms as sizes allow, uniform within it (section IV-E).

    A client of a small cluster takes part more often than one of a large cluster.
    """

    reports: Reports = "histograms"  # what clients tell the server: samples of each class, or only which they hold
    count: int | None = field(default=None, metadata={"default": "cohort size"})  # of clusters, at most

    def __post_init__(self) -> None:
        require(
            self.reports in ("histograms", "classes"),
            f"selection clusters: reports is histograms or classes, not {self.reports!r}.",
        )
        require(
            self.count is None or self.count >= 1, f"selection clusters: count must be at least 1, not {self.count}."
        )

    def chooser(self, clients: int, size: int, label_counts: Callable[[], Array], rng: np.random.Generator) -> Chooser:
        counts = label_counts()
        if self.reports == "classes":
            counts = counts > 0
        points = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        cluster = cluster_of(points, min(self.count or size, clients), rng)
        members = np.argsort(cluster, kind="stable")
        ends = np.cumsum(np.bincount(cluster))
        return partial(_across, size, [part for part in np.split(members, ends[:-1]) if len(part)])


def _across(size: int, clusters: list[Array], rng: np.random.Generator) -> Array:
    shares = even_shares(size, np.array([len(members) for members in clusters]), rng)
    return np.concatenate(
        [rng.choice(m, n, replace=False, shuffle=False) for m, n in zip(clusters, shares, strict=True)]
    )


def even_shares(total: int, rooms: Array, rng: np.random.Generator) -> Array:
    """How many each of some rooms takes, as evenly as they can; who takes one more is drawn."""
    shares = np.zeros_like(rooms)
    while left := total - int(shares.sum()):
        free = np.flatnonzero(shares < rooms)
        if left < len(free):
            shares[rng.choice(free, left, replace=False)] += 1
        else:
            shares[free] = np.minimum(shares[free] + left // len(free), rooms[free])
    return shares


def cluster_of(points: Array, count: int, rng: np.random.Generator) -> Array:
    """The cluster of each point: Lloyd's algorithm from a k-means++ start; fewer where fewer points differ."""
    some = points if len(points) <= SAMPLE else points[rng.choice(len(points), SAMPLE, replace=False)]
    centres = _spread_out(some, count, rng)
    nearest = np.full(len(some), -1)
    for _ in range(ITERATIONS):
        before, nearest = nearest, _nearest(some, centres)
        if (nearest == before).all():
            break
        sizes = np.bincount(nearest, minlength=len(centres))
        sums = np.stack([np.bincount(nearest, column, len(centres)) for column in some.T], axis=1)
        centres = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], centres)  # an empty one stays
    return _nearest(points, centres)


def _spread_out(points: Array, count: int, rng: np.random.Generator) -> Array:
    """k-means++: each centre is a point drawn by its squared distance from those before."""
    centres = [points[rng.integers(len(points))]]
    apart = _squared(points, centres[0])
    while len(centres) < count and apart.sum() > 0:
        centres.append(points[rng.choice(len(points), p=apart / apart.sum())])
        apart = np.minimum(apart, _squared(points, centres[-1]))
    return np.stack(centres)


def _nearest(points: Array, centres: Array) -> Array:
    """The first of the nearest centres of each point."""
    nearest = np.empty(len(points), dtype=np.int64)
    rows = max(1, CELLS // points.shape[1])
    for begun in range(0, len(points), rows):
        part = points[begun : begun + rows]
        nearest[begun : begun + rows] = np.argmin([_squared(part, centre) for centre in centres], axis=0)
    return nearest


def _squared(points: Array, centre: Array) -> Array:
    """Not by a matrix product, whose bits depend on threads."""
    return np.asarray(((points - centre) ** 2).sum(axis=1))
