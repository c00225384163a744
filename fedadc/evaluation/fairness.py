"""Fairness over clients: how a metric differs between them, each client counting once whatever its size."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedadc.data.dataset import Array, Clients
from fedadc.errors import require

FAIRNESS = "fairness"  # in `evaluate.metrics`
STATISTICS = ("worst", "p10", "mean", "spread")
FAIRNESS_METRICS = tuple(f"accuracy_{name}" for name in STATISTICS)


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


def client_counts(owner: Array, right: Array) -> Array:
    """The rows (client, samples, right predictions), int64, of the clients that have some of these samples."""
    known = owner >= 0
    clients, position = np.unique(owner[known], return_inverse=True)
    counted = np.bincount(position, minlength=len(clients))
    correct = np.bincount(position[right[known]], minlength=len(clients))
    return np.stack([clients, counted, correct], axis=1).astype(np.int64)


def fairness_of_counts(counts: Iterable[Array]) -> dict[str, float]:
    """The spread of the clients' accuracies, from the counts of all batches."""
    table = np.concatenate([np.zeros((0, 3), dtype=np.int64), *counts])
    _, position = np.unique(table[:, 0], return_inverse=True)
    samples, right = (np.bincount(position, weights=table[:, column]) for column in (1, 2))
    if not len(samples):
        return {}
    found = spread_over_clients(right / samples)
    return {f"accuracy_{name}": value for name, value in found.items()}
