"""Cohorts drawn across clusters of clients with similar labels (section IV-E).

Clusters give clients in proportion to their size. Equal shares would favor clients of small clusters, and unions by
them were at times farther from uniform than those of uniform cohorts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import require
from fedadc.selections.base import Chooser, Selection
from fedadc.selections.reports import Reports

SAMPLE = 5000  # clients among whom centers are sought
STARTS, ITERATIONS = 8, 100  # of k-means
PER_CLASS = 10  # clusters, where their number is not given
CELLS = 2**17  # numbers compared with a center at once


@dataclass(frozen=True, kw_only=True)
class Clusters(Selection):
    """A share of the cohort from each cluster of clients with similar labels; all equally often (section IV-E)."""

    reports: Reports = "histograms"  # what clients tell the server: samples of each class, or only which they hold
    count: int | None = field(default=None, metadata={"default": "cohort size"})  # of clusters, at most; 10 per class

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
        usual = min(size, PER_CLASS * counts.shape[1])  # beyond it they cost much and tell little more
        cluster = cluster_of(points, min(self.count or usual, clients), rng)
        members = np.argsort(cluster, kind="stable")
        ends = np.cumsum(np.bincount(cluster))
        return partial(_across, size, [part for part in np.split(members, ends[:-1]) if len(part)])


def _across(size: int, clusters: list[Array], rng: np.random.Generator) -> Array:
    """Systematic sampling: of all clients, cluster by cluster, those at equal distances from a random start.

    So each client has the same chance, and each cluster its share, rounded down or up.
    """
    order = [clusters[i] for i in rng.permutation(len(clusters))]
    ends = np.cumsum([len(members) for members in order])
    marks = (rng.integers(ends[-1]) + ends[-1] * np.arange(size)) // size
    shares = np.bincount(np.searchsorted(ends, marks, side="right"), minlength=len(order))
    return np.concatenate([rng.choice(m, n, replace=False, shuffle=False) for m, n in zip(order, shares, strict=True)])


def cluster_of(points: Array, count: int, rng: np.random.Generator) -> Array:
    """The cluster of each point: the best of some runs of k-means; fewer clusters where fewer points differ."""
    some = points if len(points) <= SAMPLE else points[rng.choice(len(points), SAMPLE, replace=False)]
    runs = [_lloyd(some, _spread_out(some, count, rng)) for _ in range(STARTS)]
    return _nearest(points, min(runs, key=lambda centers: _nearest(some, centers)[1].sum()))[0]


def _lloyd(points: Array, centers: Array) -> Array:
    """Centers moved to the means of their points until those stay."""
    nearest = np.full(len(points), -1)
    for _ in range(ITERATIONS):
        before, nearest = nearest, _nearest(points, centers)[0]
        if (nearest == before).all():
            break
        sizes = np.bincount(nearest, minlength=len(centers))
        sums = np.stack([np.bincount(nearest, column, len(centers)) for column in points.T], axis=1)
        centers = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], centers)  # an empty one stays
    return centers


def _spread_out(points: Array, count: int, rng: np.random.Generator) -> Array:
    """k-means++: each center is a point drawn by its squared distance from those before."""
    centers = [points[rng.integers(len(points))]]
    apart = _squared(points, centers[0])
    while len(centers) < count and apart.sum() > 0:
        centers.append(points[rng.choice(len(points), p=apart / apart.sum())])
        apart = np.minimum(apart, _squared(points, centers[-1]))
    return np.stack(centers)


def _nearest(points: Array, centers: Array) -> tuple[Array, Array]:
    """The first of the nearest centers of each point, and how far that is, squared."""
    nearest, apart = np.zeros(len(points), dtype=np.int64), np.full(len(points), np.inf)
    rows = max(1, CELLS // points.shape[1])
    for part in (slice(begun, begun + rows) for begun in range(0, len(points), rows)):
        for i, center in enumerate(centers):
            squared = _squared(points[part], center)
            nearest[part] = np.where(squared < apart[part], i, nearest[part])
            apart[part] = np.minimum(squared, apart[part])
    return nearest, apart


def _squared(points: Array, center: Array) -> Array:
    """Not by a matrix product, whose bits depend on threads."""
    return np.asarray(((points - center) ** 2).sum(axis=1))
