"""The constants by which the labels of a regression are scaled for training, from sums that clients may share.

A client tells the number of its training samples and, for every target, the sum of its labels and the sum of their
squared deviations from its own mean. The server adds them up in the order of the clients' names, in float64. The
constants are rounded to six digits, so that they can be written into a config and give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedadc.data.dataset import Array, Dataset
from fedadc.tasks import Target

SIGNIFICANT_DIGITS = 6


@dataclass(frozen=True)
class LabelSums:
    """What one client tells of its labels."""

    samples: int
    total: tuple[float, ...]  # Σ y of every target
    squared: tuple[float, ...]  # Σ (y - mean)², with the client's own mean

    @staticmethod
    def of(labels: Array) -> LabelSums:
        """The sums of labels [n, targets]."""
        numbers = np.asarray(labels, dtype=np.float64)
        mean = numbers.mean(axis=0)
        return LabelSums(
            len(numbers), tuple(numbers.sum(axis=0).tolist()), tuple(((numbers - mean) ** 2).sum(axis=0).tolist())
        )


def scale_of(sums: Sequence[LabelSums]) -> tuple[Array, Array]:
    """Mean and standard deviation of every target over all clients; 1 where the labels do not differ."""
    n, total = sum(own.samples for own in sums), np.sum([own.total for own in sums], axis=0)
    mean = total / n
    within = np.sum([own.squared for own in sums], axis=0)
    between = np.sum([own.samples * (np.array(own.total) / own.samples - mean) ** 2 for own in sums], axis=0)
    spread = np.sqrt((within + between) / n)
    center, spread = (np.array([rounded(value) for value in values]) for values in (mean, spread))
    return center, np.where(spread > 0, spread, 1.0)


def rounded(value: float) -> float:
    """A number with six significant digits."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def with_scaled_targets(data: Dataset) -> Dataset:
    """The data set with constants for the targets that have none, from the training samples of every client."""
    if all(target.scaled for target in data.targets):
        return data
    labels = data.train.y.numpy()
    clients = [np.arange(len(labels))]
    if data.owners is not None:
        names, owner = np.unique(np.asarray(data.owners).astype(str), return_inverse=True)
        owner = owner.reshape(-1)
        order = np.argsort(owner, kind="stable")
        clients = np.split(order, np.cumsum(np.bincount(owner, minlength=len(names)))[:-1])
    center, spread = scale_of([LabelSums.of(labels[rows]) for rows in clients])
    targets = tuple(
        target if target.scaled else replace(target, center=float(c), spread=float(s), scaled=True)
        for target, c, s in zip(data.targets, center, spread, strict=True)
    )
    return replace(data, targets=targets, notes=(*data.notes, *map(_note, targets)))


def _note(target: Target) -> str:
    return (
        f"{target.name}: to be predicted; scaled by ({target.center:g}, {target.spread:g}) in training; metrics are in "
        "its own units"
    )
