"""Classification: every sample has one of C classes, and a model returns C logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedadc.tasks.base import Array, Sums, Task

CONFUSION = "confusion"


@dataclass(frozen=True)
class Classification(Task):
    """One of so many classes; labels are int64 numbers of classes, [n]."""

    name: ClassVar[str] = "classification"
    has_classes: ClassVar[bool] = True
    score: ClassVar[str] = "accuracy"
    always: ClassVar[tuple[str, ...]] = ("accuracy", "loss")
    extra_metrics: ClassVar[tuple[str, ...]] = ("top5", "macro_f1", "per_class")
    label_metrics: ClassVar[tuple[str, ...]] = ("macro_f1", "per_class")
    sample_metric: ClassVar[str] = "accuracy"
    largest_value: ClassVar[float] = 1.0

    classes: int

    @property
    def words(self) -> tuple[str, str]:
        return "logits", f"{self.classes} classes"

    @property
    def outputs(self) -> tuple[int, ...]:
        return (self.classes,)

    def label_problem(self, y: Tensor, split: str) -> str:
        if y.dtype != torch.int64 or y.ndim != 1:
            return f"{split} labels must be int64 [n], not {y.dtype} {list(y.shape)}"
        labels = y.numpy()  # torch would start threads for it
        if not len(y) or (labels.min() >= 0 and labels.max() < self.classes):
            return ""
        sample = int(torch.nonzero((y < 0) | (y >= self.classes))[0, 0])
        return f"label {int(y[sample])} of {split} sample {sample} is outside 0..{self.classes - 1}"

    def blank_labels(self, samples: int) -> Tensor:
        return torch.zeros(samples, dtype=torch.int64)

    def strata(self, y: Tensor) -> Array:
        labels: Array = y.numpy()
        return labels

    @property
    def groups(self) -> int:
        return self.classes

    def counted(self, outputs: Tensor, y: Tensor) -> Sums:
        """The sum of cross-entropies, how many labels are among the five likeliest, and the confusion table."""
        y = y.to(outputs.device)
        loss = F.cross_entropy(outputs, y, reduction="none").cpu().double().sum()
        pairs = (y * self.classes + outputs.argmax(dim=1)).cpu().numpy()
        table = np.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)
        best = outputs.topk(min(5, self.classes), dim=1).indices
        top5 = int((best == y[:, None]).any(dim=1).sum())
        return {"loss": np.array([float(loss)]), "top5": np.array([top5]), CONFUSION: table}

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        number, count = np.dtype(np.float64), np.dtype(np.int64)
        return {"loss": ((1,), number), "top5": ((1,), count), CONFUSION: ((self.classes, self.classes), count)}

    def possible(self, sums: Sums, samples: int) -> bool:
        table, top5, loss = sums[CONFUSION], int(sums["top5"][0]), float(sums["loss"][0])
        within = int(table.min()) >= 0 and int(table.max()) <= samples and int(table.sum()) == samples
        return within and 0 <= top5 <= samples and 0 <= loss < np.inf

    def without_labels(self, sums: Sums) -> Sums:
        """A confusion table with the same accuracy, in which all samples have the first label."""
        table = sums[CONFUSION]
        right, total, hidden = int(np.trace(table)), int(table.sum()), np.zeros_like(table)
        hidden[0, 0], hidden[0, -1] = right, total - right
        return {**sums, CONFUSION: hidden}

    def metrics(self, sums: Sums, wanted: Sequence[str]) -> dict[str, Any]:
        """Accuracy and cross-entropy, and the other metrics asked for."""
        table = sums[CONFUSION]
        n, right = int(table.sum()), np.diag(table)
        metrics: dict[str, Any] = {"accuracy": float(right.sum()) / n, "loss": float(sums["loss"][0]) / n}
        if "top5" in wanted:
            metrics["top5"] = int(sums["top5"][0]) / n
        if "macro_f1" in wanted:
            both = table.sum(axis=0) + table.sum(axis=1)
            metrics["macro_f1"] = float(np.mean(2 * right[both > 0] / both[both > 0]))  # over classes that occur
        if "per_class" in wanted:
            totals = table.sum(axis=1)
            metrics["per_class"] = [float(r / t) if t else None for r, t in zip(right, totals, strict=True)]
        return metrics

    def sample_values(self, outputs: Tensor, y: Tensor) -> Array:
        """1 where the likeliest class is the label, else 0."""
        right: Array = (outputs.cpu().argmax(dim=1) == y).double().numpy()
        return right

    def sample_total(self, sums: Sums) -> float:
        return float(np.trace(sums[CONFUSION]))

    def predicted(self, outputs: Tensor) -> Array:
        """The probability of every class, [n, C]."""
        probabilities: Array = outputs.cpu().double().softmax(dim=1).numpy()
        return probabilities
