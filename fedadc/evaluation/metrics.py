"""Metrics of a model: samples are counted in fixed batches, sums are float64 and added in order.

So no figure depends on which process counted, or on how many there were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from fedadc.data.batches import Inputs
from fedadc.data.dataset import Array, Samples
from fedadc.errors import require, unknown
from fedadc.evaluation.fairness import FAIRNESS, client_sums, fairness_of_sums
from fedadc.evaluation.figures import CLASS_FIGURES
from fedadc.fields.settings import Settings
from fedadc.models.flat import FlatModel
from fedadc.rng import torch_seeded
from fedadc.system.determinism import deterministic
from fedadc.tasks import EXTRA_METRICS, TASKS, Sums, Task, added
from fedadc.training.state import Metrics


@dataclass(frozen=True)
class Evaluation(Settings):
    """When and what to evaluate. None of it changes training."""

    every: int = 1  # rounds
    last: int = 1  # so many rounds at the end are all evaluated, whatever `every` is
    metrics: tuple[str, ...] = ()  # beside those of the task: top5, macro_f1, per_class, per_target, fairness
    batch_size: int = 500
    overlap: bool = False  # evaluate on idle workers during the next round; records are written one round later
    drift: bool = False  # measure in every round how far the clients drift from the global model and from each other

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every >= 1, f"every must be at least 1, not {self.every}.")
        require(self.last >= 1, f"last must be at least 1, not {self.last}.")
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}.")
        for name in self.metrics:
            require(
                name not in CLASS_FIGURES,
                f"metrics: {name} is computed after training, by `fedadc evaluate RUN --metrics {name}`.",
            )
            if name not in (*EXTRA_METRICS, FAIRNESS):
                raise unknown("metrics: metric", name, (*EXTRA_METRICS, FAIRNESS))

    @property
    def by_class(self) -> bool:
        """Whether a metric needs the labels of the samples, and not only how many predictions are right."""
        return any(name in self.metrics for task in TASKS.values() for name in task.label_metrics)

    def due(self, round: int, rounds: int) -> bool:
        """Whether a round is evaluated, in a run of so many rounds."""
        return round % self.every == 0 or round > rounds - self.last

    def rounds_due(self, rounds: int) -> list[int]:
        return [t for t in range(1, rounds + 1) if self.due(t, rounds)]


@dataclass(frozen=True)
class EvaluationBatch:
    """The samples of one forward pass: positions start..stop of a split, the same whichever process counts them."""

    split: str
    start: int
    stop: int


@dataclass(frozen=True)
class BatchCounts:
    """What was counted on one batch."""

    split: str
    sums: Sums
    by_client: Array | None = None  # [clients, 3]: client, samples, sum of their `sample_values`; None: not counted


@dataclass(frozen=True)
class MetricCounter:
    """Judges a model's outputs batch by batch, and computes metrics from the sums."""

    model: FlatModel
    splits: dict[str, Samples]
    inputs: Inputs
    task: Task
    evaluation: Evaluation
    owners: Mapping[str, Array] = field(default_factory=dict)  # split -> the client of every sample, for fairness

    def __post_init__(self) -> None:
        possible = (*self.task.extra_metrics, FAIRNESS)
        for name in self.evaluation.metrics:
            require(
                name in possible,
                f"evaluate.metrics: {name} is no metric of {self.task.name}; it has {', '.join(possible)}.",
            )

    def batches(self) -> list[EvaluationBatch]:
        size = self.evaluation.batch_size
        return [
            EvaluationBatch(split, start, min(start + size, len(samples)))
            for split, samples in self.splits.items()
            for start in range(0, len(samples), size)
        ]

    def count(self, theta: Tensor, batch: EvaluationBatch, order: Array | None = None) -> BatchCounts:
        """Count on one batch of a split, or of its samples in another order."""
        chosen = np.arange(batch.start, batch.stop) if order is None else order[batch.start : batch.stop]
        outputs, y = self.outputs(theta, batch, chosen)
        counts = BatchCounts(batch.split, self.task.counted(outputs, y))
        if FAIRNESS not in self.evaluation.metrics or batch.split not in self.owners:
            return counts
        values = self.task.sample_values(outputs, y)
        return replace(counts, by_client=client_sums(self.owners[batch.split][chosen], values))

    def outputs(self, theta: Tensor, batch: EvaluationBatch, chosen: Array) -> tuple[Tensor, Tensor]:
        """What the model says about the chosen samples of a split, which are those of a batch, and their labels."""
        samples = self.splits[batch.split]
        x, _ = self.inputs.gather(samples, chosen)
        with torch_seeded(0, "evaluation", client=batch.start):  # for a model that is random even in evaluation mode
            return self.model.predict(theta, x), samples.labels(chosen)

    def metrics_of(self, outputs: Tensor, y: Tensor) -> Metrics:
        """Metrics of any samples with these outputs and labels."""
        return self.task.metrics(self.task.counted(outputs, y), self.evaluation.metrics)

    def metrics(self, counts: Iterable[BatchCounts]) -> dict[str, Metrics]:
        """The metrics of every split; sums are added in order."""
        of_split: dict[str, list[BatchCounts]] = {split: [] for split in self.splits}
        for batch in counts:
            of_split[batch.split].append(batch)
        return {split: self._metrics(found) for split, found in of_split.items() if found}

    def _metrics(self, counts: Sequence[BatchCounts]) -> Metrics:
        wanted = self.evaluation.metrics
        metrics = self.task.metrics(added(batch.sums for batch in counts), wanted)
        if FAIRNESS in wanted:
            metrics |= fairness_of_sums((c.by_client for c in counts if c.by_client is not None), self.task)
        return metrics

    def __call__(self, theta: Tensor) -> dict[str, Metrics]:
        with deterministic():
            return self.metrics(self.count(theta, batch) for batch in self.batches())
