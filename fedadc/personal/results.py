"""Results of a personalization: accuracies per client, statistics per row, as a table, CSV and JSON."""

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
    """How many test samples of one client its own model and the global model classify correctly."""

    client: int
    name: str  # its number if the data does not name clients
    train: int  # number of training samples
    test: int  # number of test samples
    correct: int  # by the client's own model
    global_correct: int | None  # by the global model; None if there is none


@dataclass(frozen=True)
class RowStatistics:
    """Accuracies between 0 and 1 over the clients that have test samples; None where there is nothing to average."""

    clients: int
    tested: int  # clients with a test sample
    global_mean: float | None  # accuracy of the global model, mean over clients
    global_std: float | None
    personal_mean: float | None
    personal_std: float | None
    global_cumulative: float | None  # over all test samples of all clients
    personal_cumulative: float | None
    gained: float | None  # share of clients whose own model is better than the global one
    lost: float | None  # share of clients whose own model is worse


@dataclass(frozen=True)
class ResultRow:
    """A row of the table: the accuracies of the clients' own models of one kind, on one set of test shares."""

    run: str
    regularizer: str  # none, prox, confidence; or own: models that the method itself stores
    phase: str = ""  # if the data has changed: before, after or recalibrated; `moment` in JSON and CSV
    counts: list[ClientAccuracy] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.label}: {len(self.counts)} clients>"

    @property
    def label(self) -> str:
        return f"{self.run}, {self.regularizer}" + (f", {self.phase}" if self.phase else "")

    def accuracies(self) -> tuple[Array, Array | None, Array]:
        """Accuracies of the clients with test samples: personal, global (None without), and the number of samples."""
        tested = [c for c in self.counts if c.test]
        samples = np.array([c.test for c in tested])
        personal = np.array([c.correct for c in tested]) / samples
        correct = [c.global_correct for c in tested if c.global_correct is not None]
        return personal, np.array(correct) / samples if tested and len(correct) == len(tested) else None, samples

    def figures(self) -> RowStatistics:
        personal, global_accuracy, samples = self.accuracies()
        gain = None if global_accuracy is None else personal - global_accuracy
        return RowStatistics(
            len(self.counts),
            len(personal),
            _mean(global_accuracy),
            _std(global_accuracy),
            _mean(personal),
            _std(personal),
            _mean(global_accuracy, samples),
            _mean(personal, samples),
            _mean(None if gain is None else gain > 0),
            _mean(None if gain is None else gain < 0),
        )

    def as_dict(self) -> dict[str, Any]:
        named = {"run": self.run, "regularizer": self.regularizer}
        return named | ({"moment": self.phase} if self.phase else {}) | asdict(self.figures())


def _mean(values: Array | None, weights: Array | None = None) -> float | None:
    return None if values is None or not len(values) else float(np.average(values, weights=weights))


def _std(values: Array | None) -> float | None:
    return None if values is None or len(values) < 2 else float(np.std(values, ddof=1))


def as_json(rows: Sequence[ResultRow]) -> str:
    return json.dumps([row.as_dict() for row in rows], indent=2)


def as_csv(rows: Sequence[ResultRow]) -> str:
    """A line per client and row. Accuracies are empty without test samples or without a global model."""

    def accuracy(correct: int | None, samples: int) -> float | str:
        return "" if correct is None or not samples else correct / samples

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        for c in row.counts:
            accuracies = accuracy(c.global_correct, c.test), accuracy(c.correct, c.test)
            writer.writerow([c.client, c.name, row.regularizer, row.phase, c.train, c.test, *accuracies])
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
