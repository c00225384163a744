"""The result of `fedadc.evaluate`: metrics per split; further figures are computed when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedadc.data.dataset import Array
from fedadc.errors import require, unknown
from fedadc.evaluation.frames import FigureTable, frame
from fedadc.evaluation.report import SplitReport
from fedadc.training.state import Metrics

BY = ("client", "class", "target")


class EvaluationResult(dict[str, Metrics]):
    """Split -> metric -> value; and what the judged model does on a split, in detail.

    `per_client`, `per_class`, `confusion` and `fairness` are of the test split, or of the data that was given;
    `report("validation")` has those of another split.
    """

    def __init__(self, metrics: Mapping[str, Metrics], reports: Mapping[str, SplitReport], by: str | None) -> None:
        super().__init__(metrics)
        self.reports, self.by = dict(reports), by
        tests: list[str] = [name for name in ("test", "personal test") if name in self.reports]
        self.split = [*tests, *self.reports][0]  # of the details
        self.repeated: tuple[str, ...] = ()  # splits of the best model where it is the last one, whose rows are equal
        self.intervals: dict[str, dict[str, tuple[float, float]]] = {}  # split -> metric -> (low, high)
        if by == "client":
            self.report().owners  # noqa: B018 - refused now rather than later
        if by == "class":
            self.report().require_classes("by class")
        if by == "target":
            self.per_target  # noqa: B018

    def report(self, split: str | None = None) -> SplitReport:
        """The details of a split; by default of the test split, or of the data that was given."""
        name = self.split if split is None else split
        if name not in self.reports:
            raise unknown("split", name, self.reports)
        return self.reports[name]

    @property
    def per_client(self) -> FigureTable:
        """Per client with rows in the split: samples, accuracy, loss and the other metrics."""
        return self.report().per_client

    @property
    def per_class(self) -> FigureTable:
        """Per class: precision, recall (sensitivity), specificity, F1, support, AUROC and average precision."""
        return self.report().per_class

    @property
    def per_target(self) -> FigureTable:
        """Per number to predict, in its own units: MSE, RMSE, MAE and R²."""
        return self.report().per_target

    @property
    def by_table(self) -> FigureTable:
        """The figures that `by` asks for."""
        require(self.by is not None, 'there are figures by client, class or target; say which with by="client".')
        table: FigureTable = getattr(self.report(), f"per_{self.by}")
        return table

    @property
    def confusion(self) -> Array:
        """The number of rows by label and prediction, int64 [classes, classes]."""
        return self.report().confusion

    @property
    def fairness(self) -> dict[str, dict[str, float]]:
        """Per metric: the worst client, the tenth percentile, the mean over clients, the standard deviation."""
        return self.report().fairness

    def compute_intervals(self) -> None:
        """Draw the bootstrap intervals of every split; of clients with by='client', else of rows."""
        self.intervals = {name: report.intervals(self.by == "client") for name, report in self.reports.items()}

    def rows(self) -> list[dict[str, Any]]:
        """A row for every metric of every split: data, metric, value and, with intervals, low and high."""
        found = []
        for split, metrics in self.items():
            for name, value in metrics.items():
                row: dict[str, Any] = {"data": split, "metric": name, "value": value}
                if self.intervals:
                    low, high = self.intervals.get(split, {}).get(name, (None, None))
                    row |= {"low": low, "high": high}
                found.append(row)
        return found

    def to_frame(self) -> Any:
        """A DataFrame: a row per client, class or target, as `by` says; without it, a row per metric."""
        return frame(self.rows(), "data") if self.by is None else self.by_table.to_frame()

    def as_json(self) -> dict[str, Any]:
        """All that was asked for, as plain values: the metrics alone, or them and the details beside them."""
        if self.by is None and not self.intervals:
            return dict(self)
        found: dict[str, Any] = {"metrics": dict(self), "split": self.split}
        if self.intervals:
            found["intervals"] = self.intervals
        if self.by == "client":
            found |= {"clients": self.per_client, "fairness": self.fairness}
        if self.by == "class":
            classes = list(self.report().classes)
            found |= {"classes": self.per_class, "confusion": {"classes": classes, "counts": self.confusion.tolist()}}
        if self.by == "target":
            found["targets"] = self.per_target
        return found
