"""Fairness over clients: how a metric differs between them, each client counting once whatever its size."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedadc.data.dataset import Array, Clients
from fedadc.errors import require
from fedadc.tasks import TASKS, Task

FAIRNESS = "fairness"  # in `evaluate.metrics`
STATISTICS = ("worst", "p10", "mean", "spread")


def fairness_metrics(task: type[Task]) -> tuple[str, ...]:
    """The names of the metrics that `fairness` adds to those of a task."""
    return tuple(f"{task.sample_metric}_{name}" for name in STATISTICS)


FAIRNESS_METRICS = tuple(name for task in TASKS.values() for name in fairness_metrics(task))
FAIRNESS_LOWER_IS_BETTER = tuple(
    f"{task.sample_metric}_{name}"
    for task in TASKS.values()
    for name in STATISTICS
    if name == "spread" or task.sample_metric in task.lower_is_better
)


def spread_over_clients(values: Array, higher_is_better: bool = True) -> dict[str, float]:
    """The worst value, the tenth percentile from the bad end, the mean and the standard deviation (divisor n).

    Percentiles are interpolated linearly between the two nearest clients.
    """
    require(len(values) > 0, "fairness needs the value of at least one client.")
    worst = values.min() if higher_is_better else values.max()
    found = worst, np.percentile(values, 10 if higher_is_better else 90), values.mean(), values.std()
    return dict(zip(STATISTICS, map(float, found), strict=True))


def owner_of_rows(shares: Clients, rows: int) -> Array:
    """The number of the client of every row, int32; -1: no client has it."""
    owner = np.full(rows, -1, dtype=np.int32)
    owner[shares.indices] = np.repeat(np.arange(len(shares)), shares.sizes)
    return owner


def client_sums(owner: Array, values: Array) -> Array:
    """The rows (client, samples, sum of their values), float64, of the clients that have some of these samples."""
    known = owner >= 0
    clients, position = np.unique(owner[known], return_inverse=True)
    counted = np.bincount(position, minlength=len(clients))
    total = np.bincount(position, weights=values[known], minlength=len(clients))
    return np.stack([clients, counted, total], axis=1).astype(np.float64)


def fairness_of_sums(sums: Iterable[Array], task: type[Task] | Task) -> dict[str, float]:
    """How the `sample_metric` of a task spreads over clients, from the sums of all batches, added in order."""
    table = np.concatenate([np.zeros((0, 3)), *sums])
    _, position = np.unique(table[:, 0], return_inverse=True)
    samples, totals = (np.bincount(position, weights=table[:, column]) for column in (1, 2))
    if not len(samples):
        return {}
    found = spread_over_clients(totals / samples, task.sample_metric not in task.lower_is_better)
    return {f"{task.sample_metric}_{name}": value for name, value in found.items()}
