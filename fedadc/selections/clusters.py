"""Client selection across clusters of clients with similar labels (section IV-E).

Each cluster contributes clients in proportion to its size. With equal shares, clients of small clusters would be chosen
more often, and the label distribution of a cohort was sometimes farther from uniform than with uniform selection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import require
from fedadc.selections.base import Chooser, Selection
from fedadc.selections.reports import Reports

SAMPLE = 5000  # at most this many clients are used to find the cluster centers
STARTS, ITERATIONS = 8, 100  # k-means: restarts, and iterations of each
CLUSTERS_PER_CLASS = 10  # upper limit of the default number of clusters
COMPARED_AT_ONCE = 2**17  # numbers compared with a center at once


@dataclass(frozen=True, kw_only=True)
class Clusters(Selection):
    """A proportional share of the cohort from each cluster of clients with similar labels (section IV-E)."""

    needs_label_counts: ClassVar[bool] = True

    reports: Reports = "histograms"  # clients report their samples per class, or only which classes they hold
    count: int | None = field(default=None, metadata={"default": "cohort size"})  # maximum number of clusters

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.count is None or self.count >= 1, f"count must be at least 1, not {self.count}.")

    def chooser(self, clients: int, size: int, label_counts: Callable[[], Array], rng: np.random.Generator) -> Chooser:
        counts = label_counts()
        if self.reports == "classes":
            counts = counts > 0
        points = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        default_count = min(size, CLUSTERS_PER_CLASS * counts.shape[1])  # more clusters cost time and gain little
        cluster = cluster_of(points, min(self.count or default_count, clients), rng)
        members = np.argsort(cluster, kind="stable")
        ends = np.cumsum(np.bincount(cluster))
        return partial(_systematic_sample, size, [part for part in np.split(members, ends[:-1]) if len(part)])


def _systematic_sample(size: int, clusters: list[Array], rng: np.random.Generator) -> Array:
    """A cohort by systematic sampling: list clients by cluster, then take equidistant positions from a random start.

    Every client has the same probability, and every cluster gets its proportional share, rounded down or up.
    """
    order = [clusters[i] for i in rng.permutation(len(clusters))]
    ends = np.cumsum([len(members) for members in order])
    marks = (rng.integers(ends[-1]) + ends[-1] * np.arange(size)) // size
    shares = np.bincount(np.searchsorted(ends, marks, side="right"), minlength=len(order))
    return np.concatenate([rng.choice(m, n, replace=False, shuffle=False) for m, n in zip(order, shares, strict=True)])


def cluster_of(points: Array, count: int, rng: np.random.Generator) -> Array:
    """The cluster of each point, from the best of several k-means runs.

    There are fewer than `count` clusters if there are fewer distinct points.
    """
    sample = points if len(points) <= SAMPLE else points[rng.choice(len(points), SAMPLE, replace=False)]
    runs = [_lloyd(sample, _initial_centers(sample, count, rng)) for _ in range(STARTS)]
    return _nearest(points, min(runs, key=lambda centers: _nearest(sample, centers)[1].sum()))[0]


def _lloyd(points: Array, centers: Array) -> Array:
    """Lloyd's algorithm: move each center to the mean of its points until the assignment no longer changes."""
    nearest = np.full(len(points), -1)
    for _ in range(ITERATIONS):
        before, nearest = nearest, _nearest(points, centers)[0]
        if (nearest == before).all():
            break
        sizes = np.bincount(nearest, minlength=len(centers))
        sums = np.stack([np.bincount(nearest, column, len(centers)) for column in points.T], axis=1)
        means = sums / np.maximum(sizes, 1)[:, None]
        centers = np.where(sizes[:, None] > 0, means, centers)  # an empty cluster keeps its center
    return centers


def _initial_centers(points: Array, count: int, rng: np.random.Generator) -> Array:
    """k-means++: draw each center with a probability proportional to its squared distance from the previous ones."""
    centers = [points[rng.integers(len(points))]]
    distance = _squared_distance(points, centers[0])
    while len(centers) < count and distance.sum() > 0:
        centers.append(points[rng.choice(len(points), p=distance / distance.sum())])
        distance = np.minimum(distance, _squared_distance(points, centers[-1]))
    return np.stack(centers)


def _nearest(points: Array, centers: Array) -> tuple[Array, Array]:
    """The nearest center of each point (the first if several are equally near), and its squared distance."""
    nearest, distance = np.zeros(len(points), dtype=np.int64), np.full(len(points), np.inf)
    rows = max(1, COMPARED_AT_ONCE // points.shape[1])
    for part in (slice(start, start + rows) for start in range(0, len(points), rows)):
        for i, center in enumerate(centers):
            candidate = _squared_distance(points[part], center)
            nearest[part] = np.where(candidate < distance[part], i, nearest[part])
            distance[part] = np.minimum(candidate, distance[part])
    return nearest, distance


def _squared_distance(points: Array, center: Array) -> Array:
    """Squared distances, without a matrix product, whose bits would depend on the number of threads."""
    return np.asarray(((points - center) ** 2).sum(axis=1))
