"""Results of a personalization: how good the models of every client are, statistics per row, a table, CSV and JSON.

Models are compared by the metric of the task that is a mean over samples: accuracy, or the mean squared error.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fedadc.data.dataset import Array
from fedadc.fields.summary import short_number
from fedadc.tasks import Classification, Task

COLUMNS = ("client", "name", "regularizer", "moment", "train_samples", "test_samples")


@dataclass(frozen=True)
class ClientTotal:
    """How good one client's own model and the global model are on its test samples: sums of `Task.sample_values`."""

    client: int
    name: str  # its number if the data does not name clients
    train: int  # number of training samples
    test: int  # number of test samples
    own: float  # of the client's own model; of a classifier, the number of samples that it classifies correctly
    shared: float | None  # of the global model; None if there is none


@dataclass(frozen=True)
class RowStatistics:
    """Values over the clients that have test samples; None where there is nothing to average."""

    clients: int
    tested: int  # clients with a test sample
    global_mean: float | None  # of the global model, mean over clients
    global_std: float | None
    personal_mean: float | None
    personal_std: float | None
    global_cumulative: float | None  # over all test samples of all clients
    personal_cumulative: float | None
    gained: float | None  # share of clients whose own model is better than the global one
    lost: float | None  # share of clients whose own model is worse


@dataclass(frozen=True)
class ResultRow:
    """A row of the table: the clients' own models of one kind, on one set of test shares."""

    run: str
    regularizer: str  # none, prox, confidence; or own: models that the method itself stores
    phase: str = ""  # if the data has changed: before, after or recalibrated; `moment` in JSON and CSV
    totals: list[ClientTotal] = field(default_factory=list)
    task: type[Task] = Classification

    def __repr__(self) -> str:
        return f"<{self.label}: {len(self.totals)} clients>"

    @property
    def label(self) -> str:
        return f"{self.run}, {self.regularizer}" + (f", {self.phase}" if self.phase else "")

    @property
    def metric(self) -> str:
        """The metric by which models are compared."""
        return self.task.sample_metric

    @property
    def is_share(self) -> bool:
        """Whether the metric is a share between 0 and 1, which is shown in percent."""
        return self.task.largest_value == 1

    def values(self) -> tuple[Array, Array | None, Array]:
        """The metric of the clients with test samples: personal, global (None without), and the number of samples."""
        tested = [c for c in self.totals if c.test]
        samples = np.array([c.test for c in tested])
        personal = np.array([c.own for c in tested]) / samples
        shared = [c.shared for c in tested if c.shared is not None]
        return personal, np.array(shared) / samples if tested and len(shared) == len(tested) else None, samples

    def figures(self) -> RowStatistics:
        personal, shared, samples = self.values()
        gain = None if shared is None else self.task.gain(personal, shared)
        return RowStatistics(
            len(self.totals),
            len(personal),
            _mean(shared),
            _std(shared),
            _mean(personal),
            _std(personal),
            _mean(shared, samples),
            _mean(personal, samples),
            _mean(None if gain is None else gain > 0),
            _mean(None if gain is None else gain < 0),
        )

    def as_dict(self) -> dict[str, Any]:
        named = {"run": self.run, "regularizer": self.regularizer, "metric": self.metric}
        return named | ({"moment": self.phase} if self.phase else {}) | asdict(self.figures())


def _mean(values: Array | None, weights: Array | None = None) -> float | None:
    return None if values is None or not len(values) else float(np.average(values, weights=weights))


def _std(values: Array | None) -> float | None:
    return None if values is None or len(values) < 2 else float(np.std(values, ddof=1))


def as_json(rows: Sequence[ResultRow]) -> str:
    return json.dumps([row.as_dict() for row in rows], indent=2)


def as_csv(rows: Sequence[ResultRow]) -> str:
    """A line per client and row. Values are empty without test samples or without a global model."""

    def mean(total: float | None, samples: int) -> float | str:
        return "" if total is None or not samples else total / samples

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    metric = rows[0].metric if rows else Classification.sample_metric
    writer.writerow([*COLUMNS, f"global_{metric}", f"personal_{metric}"])
    for row in rows:
        for c in row.totals:
            means = mean(c.shared, c.test), mean(c.own, c.test)
            writer.writerow([c.client, c.name, row.regularizer, row.phase, c.train, c.test, *means])
    return text.getvalue()


def table_rows(rows: Sequence[ResultRow]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table, accuracies in percent."""

    def percent(value: float | None, digits: int = 1) -> str:
        return "–" if value is None else f"{100 * value:.{digits}f}"

    def shown(value: float | None, row: ResultRow) -> str:
        return "–" if value is None else percent(value) if row.is_share else short_number(value, 3)

    cells = []
    for row in rows:
        f = row.figures()
        std = "" if f.personal_std is None else f" ± {shown(f.personal_std, row)}"
        both = f"{shown(f.global_cumulative, row)} → {shown(f.personal_cumulative, row)}"
        means = shown(f.global_mean, row), shown(f.personal_mean, row) + std
        cells.append([row.label, str(f.tested), *means, both, percent(f.gained, 0), percent(f.lost, 0)])
    return ["run", "clients", "global", "personal", "all samples", "gained", "lost"], cells
