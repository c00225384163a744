"""What clients' own models are worth on the clients' own test shares: counts per client, and the figures of a row."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fedadc.data.dataset import Array

COLUMNS = ("client", "name", "regularizer", "moment", "train_samples", "test_samples", "global_accuracy",
           "personal_accuracy")  # fmt: skip


@dataclass(frozen=True)
class ClientAccuracy:
    """Of one client: its samples, and how many of its test samples two models get right."""

    client: int
    name: str  # where the data names clients, else its number
    train: int
    test: int
    right: int
    right_global: int | None  # None: there is no global model


@dataclass(frozen=True)
class RowStatistics:
    """Shares, over those clients that have a test sample; None where there is nothing to say."""

    clients: int
    tested: int  # of them, with a test sample
    global_mean: float | None  # over clients
    global_std: float | None
    personal_mean: float | None
    personal_std: float | None
    global_cumulative: float | None  # over all test samples of all clients
    personal_cumulative: float | None
    gained: float | None  # the share of clients that their own model serves better
    lost: float | None


@dataclass(frozen=True)
class ResultRow:
    """The clients' own models of one kind, on one set of test shares."""

    run: str
    regularizer: str  # none, prox, confidence; own: what the method itself keeps at its clients
    moment: str = ""  # where data has changed: before, after, recalibrated
    counts: list[ClientAccuracy] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.run}, {self.regularizer}" + (f", {self.moment}" if self.moment else "")

    def accuracies(self) -> tuple[Array, Array | None, Array]:
        """Of tested clients: the personal model's, the global one's, and how many samples they are of."""
        tested = [c for c in self.counts if c.test]
        samples = np.array([c.test for c in tested])
        personal = np.array([c.right for c in tested]) / samples
        found = [c.right_global for c in tested if c.right_global is not None]
        return personal, np.array(found) / samples if tested and len(found) == len(tested) else None, samples

    def figures(self) -> RowStatistics:
        personal, of_global, samples = self.accuracies()
        gain = None if of_global is None else personal - of_global
        return RowStatistics(
            len(self.counts),
            len(personal),
            _mean(of_global),
            _std(of_global),
            _mean(personal),
            _std(personal),
            _mean(of_global, samples),
            _mean(personal, samples),
            _mean(None if gain is None else gain > 0),
            _mean(None if gain is None else gain < 0),
        )

    def as_dict(self) -> dict[str, Any]:
        named = {"run": self.run, "regularizer": self.regularizer}
        return named | ({"moment": self.moment} if self.moment else {}) | asdict(self.figures())


def _mean(values: Array | None, weights: Array | None = None) -> float | None:
    return None if values is None or not len(values) else float(np.average(values, weights=weights))


def _std(values: Array | None) -> float | None:
    return None if values is None or len(values) < 2 else float(np.std(values, ddof=1))


def as_json(rows: Sequence[ResultRow]) -> str:
    return json.dumps([row.as_dict() for row in rows], indent=2)


def as_csv(rows: Sequence[ResultRow]) -> str:
    """A line per client and row; empty where a client has no test sample, or the method no global model."""

    def share(right: int | None, of: int) -> float | str:
        return "" if right is None or not of else right / of

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        for c in row.counts:
            accuracies = share(c.right_global, c.test), share(c.right, c.test)
            writer.writerow([c.client, c.name, row.regularizer, row.moment, c.train, c.test, *accuracies])
    return text.getvalue()


def table_rows(rows: Sequence[ResultRow]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table, in percent."""

    def percent(value: float | None, digits: int = 1) -> str:
        return "–" if value is None else f"{100 * value:.{digits}f}"

    cells = []
    for row in rows:
        f = row.figures()
        std = "" if f.personal_std is None else f" ± {percent(f.personal_std)}"
        both = f"{percent(f.global_cumulative)} → {percent(f.personal_cumulative)}"
        means = percent(f.global_mean), percent(f.personal_mean) + std
        cells.append([row.label, str(f.tested), *means, both, percent(f.gained, 0), percent(f.lost, 0)])
    return ["run", "clients", "global", "personal", "all samples", "gained", "lost"], cells
