"""The constants by which the labels of a regression are scaled for training, from sums that clients may share.

A client tells the number of its training samples and, for every target, the sum of its labels and the sum of their
squared deviations from its own mean, as for columns of a table (`fedadc.data.summaries`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedadc.data.columns import Fields
from fedadc.data.dataset import Array, Clients, Dataset
from fedadc.data.fitting import standard_constants
from fedadc.data.summaries import ColumnSummary, TableSummary, merge, summaries
from fedadc.tasks import Target

Sums = tuple[int, float, float]  # n, Σy and Σ(y - mean)²


def sums_of_targets(labels: Array, clients: Sequence[Array]) -> list[tuple[Sums, ...]]:
    """What every client tells of its labels [n, targets], given the numbers of its samples; for every target."""
    columns = {str(i): Fields.of_numbers(labels[:, i].astype(np.float64)) for i in range(labels.shape[1])}
    blank = Fields.of_texts(np.zeros(len(labels), dtype=np.int32), ("",))
    told = summaries(columns, blank, clients, sums=columns)
    return [tuple(column.sums or (0, 0.0, 0.0) for column in one.columns.values()) for one in told]


def scaled_targets(targets: Sequence[Target], told: Sequence[Sequence[Sums]]) -> tuple[Target, ...]:
    """The targets with mean and standard deviation over all clients, where they have no constants; told in order."""
    columns = [{target.name: ColumnSummary(sums=own) for target, own in zip(targets, one, strict=True)} for one in told]
    merged = merge([TableSummary(0, several, ()) for several in columns]).columns
    found = []
    for target in targets:
        center, spread = standard_constants(merged[target.name])
        found.append(target if target.scaled else Target(target.name, center, spread))
    return tuple(found)


def with_scaled_targets(data: Dataset) -> Dataset:
    """The data set with constants for the targets that have none, from the training samples of every client."""
    if all(target.scaled for target in data.targets):
        return data
    labels, clients = data.train.y.numpy(), [np.arange(len(data.train))]
    if data.owners is not None:
        names, owner = np.unique(np.asarray(data.owners).astype(str), return_inverse=True)
        shares = Clients.from_owner(owner.reshape(-1), len(names))
        clients = [shares[k] for k in range(len(shares))]
    targets = scaled_targets(data.targets, sums_of_targets(labels, clients))
    return replace(data, targets=targets, notes=(*data.notes, *notes_about_targets(targets)))


def notes_about_targets(targets: Sequence[Target]) -> list[str]:
    """What becomes of every number to predict."""
    return [
        f"{target.name}: to be predicted; scaled by [{target.center!r}, {target.spread!r}] in training; metrics are in "
        "its own units"
        for target in targets
    ]
