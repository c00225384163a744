"""What a model does on one split, in detail: by client, by class, by target, as a confusion matrix, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedadc.data.dataset import Array, Clients
from fedadc.errors import FedadcError, require, unknown
from fedadc.evaluation.fairness import spread_over_clients
from fedadc.evaluation.figures import CLASS_FIGURES, OF_TWO_CLASSES, Judged, of_classes
from fedadc.evaluation.frames import FigureTable
from fedadc.evaluation.intervals import percentile_intervals
from fedadc.evaluation.metrics import EvaluationBatch, MetricCounter
from fedadc.evaluation.stopping import higher_is_better
from fedadc.models.vectors import Vector
from fedadc.system.determinism import deterministic
from fedadc.tasks import Regression


@dataclass(frozen=True)
class Owners:
    """Which client has which rows of a split."""

    names: tuple[str, ...]
    rows: tuple[Array, ...]  # of every client, ascending; none is empty

    @staticmethod
    def of(owners: Iterable[object], order: Sequence[str] = ()) -> Owners:
        """From the client of every row; clients in `order` come first, in that order, then the others by name."""
        names, position = np.unique(np.array(list(map(str, owners))), return_inverse=True)
        numbers = {name: k for k, name in enumerate(names.tolist())}
        ordered = [name for name in order if name in numbers]
        ordered += sorted(numbers.keys() - set(ordered))
        shares = Clients.from_owner(position.reshape(-1), len(names))
        return Owners(tuple(ordered), tuple(shares[numbers[name]] for name in ordered))

    @staticmethod
    def of_shares(shares: Clients, names: Sequence[str]) -> Owners:
        """From the rows of every client, without the clients that have none."""
        having = np.flatnonzero(shares.sizes).tolist()
        return Owners(tuple(names[k] for k in having), tuple(shares[k] for k in having))

    @property
    def shares(self) -> Clients:
        """The rows of the clients, who are numbered in the order of their names here."""
        indices = np.concatenate([np.zeros(0, dtype=np.int64), *self.rows])
        return Clients(indices, np.cumsum([0, *map(len, self.rows)]))


@dataclass(frozen=True)
class SplitReport:
    """A model on the rows of one split. Figures are computed when they are asked for."""

    split: str
    counter: MetricCounter
    theta: Vector
    classes: tuple[str, ...]
    find_owners: Callable[[], Owners]
    positive: str | None = None  # the class of binary figures; None: the last of two, or means over all classes
    figures: tuple[str, ...] = ()  # names of CLASS_FIGURES, beside the metrics of the counter
    seed: int = 0  # of the intervals

    def __post_init__(self) -> None:
        for name in self.figures:
            if name not in CLASS_FIGURES:
                raise unknown("metric", name, CLASS_FIGURES)
        needed = self.positive is not None or self.figures
        if needed:
            self.require_classes("positive" if self.positive is not None else self.figures[0])
        if self.positive is not None and self.positive not in self.classes:
            raise unknown("positive: class", self.positive, self.classes)
        for name in OF_TWO_CLASSES:
            require(
                name not in self.figures or self.positive_number is not None,
                f"{name} needs two classes or a positive one, but there are {len(self.classes)}; give `positive`, or "
                "see the figures by class.",
            )

    def __repr__(self) -> str:
        return f"SplitReport({self.split}: {self.samples:,} rows, {self.counter.task.words[1]})"

    def require_classes(self, what: str) -> None:
        """Refuse what needs classes for a task without them."""
        task = self.counter.task
        require(task.has_classes, f"{what} needs classes, which {task.name} does not have.")

    @property
    def samples(self) -> int:
        return len(self.counter.splits[self.split])

    @property
    def positive_number(self) -> int | None:
        """The number of the positive class; None with more than two classes, unless one was chosen."""
        if self.positive is not None:
            return self.classes.index(self.positive)
        return 1 if len(self.classes) == 2 else None

    @cached_property
    def outputs(self) -> tuple[Tensor, Tensor]:
        """The model's outputs for all rows, in the same batches in which metrics are counted, and the labels."""
        batches = [batch for batch in self.counter.batches() if batch.split == self.split]
        require(bool(batches), f"{self.split} has no rows.")
        with deterministic():
            found = [self.counter.outputs(self.theta, batch, positions_of(batch)) for batch in batches]
        outputs, labels = zip(*found, strict=True)
        return torch.cat(outputs).cpu(), torch.cat(labels).cpu()

    @cached_property
    def judged(self) -> Judged:
        """Labels, predictions and probabilities, for the figures of a classifier."""
        self.require_classes("a figure by class")
        outputs, labels = self.outputs
        probabilities = self.counter.task.predicted(outputs)
        predicted, logits = outputs.argmax(dim=1).numpy(), outputs.double().numpy()
        return Judged(labels.numpy(), predicted, probabilities, logits, self.positive_number)

    def numbers(self, rows: Array) -> dict[str, float | None]:
        """The metrics of some of the rows that are single numbers, then the figures that were asked for."""
        outputs, labels = self.outputs
        chosen = torch.from_numpy(rows)
        with deterministic():
            metrics = self.counter.metrics_of(outputs[chosen], labels[chosen])
        counted: dict[str, float | None] = {
            name: float(value) for name, value in metrics.items() if isinstance(value, float)
        }
        return {**counted, **self.extra(rows)}

    def extra(self, rows: Array | None = None) -> dict[str, float | None]:
        """The figures that were asked for, of some rows or of all."""
        chosen = self.all_rows if rows is None else rows
        return {name: CLASS_FIGURES[name](self.judged, chosen) for name in self.figures}

    @property
    def all_rows(self) -> Array:
        return np.arange(self.samples)

    @cached_property
    def per_client(self) -> FigureTable:
        """Per client with rows in this split: the number of them, and metrics."""
        owners = self.owners
        found = zip(owners.names, owners.rows, strict=True)
        return FigureTable("client", {name: {"samples": len(rows), **self.numbers(rows)} for name, rows in found})

    @cached_property
    def owners(self) -> Owners:
        """The clients and their rows; refused if they are not known."""
        return self.find_owners()

    @cached_property
    def fairness(self) -> dict[str, dict[str, float]]:
        """Per metric, the worst client, the tenth percentile, the mean over clients and the standard deviation."""
        rows = self.per_client.values()
        names = dict.fromkeys(name for row in rows for name in row if name != "samples")
        values = {name: [row.get(name) for row in rows] for name in names}
        return {
            name: spread_over_clients(np.array(found), higher_is_better(name))
            for name, found in values.items()
            if None not in found
        }

    @cached_property
    def per_class(self) -> FigureTable:
        """Per class: precision, recall (sensitivity), specificity, F1, support, AUROC and average precision."""
        rows = of_classes(self.judged, self.all_rows)
        return FigureTable("class", dict(zip(self.classes, rows, strict=True)))

    @cached_property
    def per_target(self) -> FigureTable:
        """Per number to predict, in its own units: MSE, its square root, MAE and R²."""
        task = self.counter.task
        if not isinstance(task, Regression):
            raise FedadcError(f"a figure by target needs task: regression, not {task.name}; see the figures by class.")
        outputs, labels = self.outputs
        each = task.of_targets(task.counted(outputs, labels))
        columns = {"mse": each["mse"], "rmse": np.sqrt(each["mse"]).tolist(), "mae": each["mae"], "r2": each["r2"]}
        rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        return FigureTable("target", dict(zip((target.name for target in task.targets), rows, strict=True)))

    @cached_property
    def confusion(self) -> Array:
        """The number of rows by label and prediction, int64 [classes, classes]."""
        return self.judged.confusion(self.all_rows)

    def intervals(self, by_client: bool = False) -> dict[str, tuple[float, float]]:
        """95 % bootstrap intervals of the numbers over all rows; what they cover: `percentile_intervals`."""
        clients = self.owners.rows if by_client else None
        return percentile_intervals(self.numbers, self.samples, self.seed, clients)

    def to_frame(self) -> Any:
        """The figures of the clients as a DataFrame."""
        return self.per_client.to_frame()


@dataclass(frozen=True)
class OwnModelsReport(SplitReport):
    """The clients' own models, each on the client's own rows, which are in order of clients."""

    offsets: Array = field(default_factory=lambda: np.zeros(1, dtype=np.int64))  # client k: offsets[k]..offsets[k + 1]
    model_of: Callable[[int], Vector] | None = None

    @staticmethod
    def of(
        split: str,
        counter: MetricCounter,
        shares: Clients,
        names: Sequence[str],
        model_of: Callable[[int], Vector],
        theta: Vector,
        classes: tuple[str, ...],
        positive: str | None,
        figures: tuple[str, ...],
        seed: int,
    ) -> OwnModelsReport:
        """A report on the rows of a split that belong to clients."""
        rows = counter.splits[split].take(shares.indices)
        ordered = Clients(np.arange(len(rows)), shares.offsets)
        return OwnModelsReport(
            split, replace(counter, splits={split: rows}, owners={}), theta, classes,
            partial(Owners.of_shares, ordered, names), positive, figures, seed, shares.offsets, model_of,
        )  # fmt: skip

    @cached_property
    def outputs(self) -> tuple[Tensor, Tensor]:
        """The outputs of every client's own model for its rows, in the batches of training, and the labels."""
        require(self.samples > 0 and self.model_of is not None, f"{self.split} has no rows of clients.")
        with deterministic():
            found = [output for client in np.flatnonzero(np.diff(self.offsets)) for output in self._of(int(client))]
        outputs, labels = zip(*found, strict=True)
        return torch.cat(outputs).cpu(), torch.cat(labels).cpu()

    def _of(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self.model_of is None:
            return
        theta, size = self.model_of(client), self.counter.evaluation.batch_size
        first, end = self.offsets[client : client + 2].tolist()
        for start in range(first, end, size):
            batch = EvaluationBatch(self.split, start, min(start + size, end))
            yield self.counter.outputs(theta, batch, positions_of(batch))


def positions_of(batch: EvaluationBatch) -> Array:
    """The rows of a batch."""
    return np.arange(batch.start, batch.stop)
