"""Figures of a classifier from labels, predictions and probabilities: pure functions of arrays, in float64.

Where a figure is not defined, e.g. a recall of a class without rows, it is None. No figure depends on the order of the
rows or on how rows were cut into batches, except by the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import require

CALIBRATION_BINS = 15


@dataclass(frozen=True)
class Judged:
    """The labels of n rows, and what a classifier says about them."""

    labels: Array  # int64 [n]
    predicted: Array  # int64 [n]
    probabilities: Array  # float64 [n, classes]
    logits: Array  # float64 [n, classes]
    positive: int | None = None  # the class of binary figures; None: means over all classes

    def __post_init__(self) -> None:
        bad = np.flatnonzero(~np.isfinite(self.probabilities).all(axis=1))
        require(
            not len(bad),
            f"the model has outputs that are not finite for {len(bad)} of {len(self.labels)} rows, the first of them "
            f"row {bad[0] if len(bad) else 0}, so there are no probabilities.",
        )

    @property
    def classes(self) -> int:
        return int(self.probabilities.shape[1])

    @cached_property
    def scores(self) -> Array:
        """Log odds of every class against all others, float64 [n, classes]; of confident rows they differ, too.

        They rank rows as probabilities do, but probabilities near 1 are rounded to 1 and would be ties.
        """
        rows, top = np.arange(len(self.logits)), self.logits.argmax(axis=1)
        highest, rest = self.logits[rows, top][:, None], self.logits.copy()
        rest[rows, top] = -np.inf
        shares = np.exp(rest - highest)
        others = np.maximum(shares.sum(axis=1, keepdims=True) - shares, 0)
        scores: Array = self.logits - highest - np.log1p(others)
        scores[rows, top] = highest[:, 0] - np.logaddexp.reduce(rest, axis=1)
        return scores

    @cached_property
    def levels(self) -> list[Array]:
        """Per class, the number of every row's score among the different ones, in ascending order."""
        return [np.unique(column, return_inverse=True)[1].reshape(-1) for column in self.scores.T]

    def confusion(self, rows: Array) -> Array:
        """The number of these rows by label and prediction, int64 [classes, classes]."""
        pairs = self.labels[rows] * self.classes + self.predicted[rows]
        return np.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)

    def ranked(self, rows: Array, of: int) -> tuple[Array, Array]:
        """The number of rows of a class, and of other rows, at every different score, in ascending order."""
        levels = self.levels[of]
        pairs = 2 * levels[rows] + (self.labels[rows] == of)
        counts = np.bincount(pairs, minlength=2 * int(levels.max()) + 2).reshape(-1, 2)
        return counts[:, 1], counts[:, 0]


def ratio(part: float, whole: float) -> float | None:
    """A share; None of nothing."""
    return float(part) / float(whole) if whole else None


def area_under_roc(positives: Array, negatives: Array) -> float | None:
    """The probability that a positive row has a higher score than a negative one; equal scores count one half.

    From the counts at every different score, in ascending order. It is the rank sum of Mann and Whitney, with
    midranks; numerator and denominator are whole numbers.
    """
    below = np.cumsum(negatives) - negatives
    halves = int((positives * (2 * below + negatives)).sum())
    return ratio(halves, 2 * int(positives.sum()) * int(negatives.sum()))


def precision_over_recall(positives: Array, negatives: Array) -> float | None:
    """Average precision: the sum over thresholds of (recall - recall before) × precision. Rows of equal score are one.

    From the counts at every different score, in ascending order.
    """
    total = int(positives.sum())
    if not total:
        return None
    found = np.cumsum(positives[::-1])
    precision = found / np.maximum(np.cumsum((positives + negatives)[::-1]), 1)
    return float((positives[::-1] / total * precision).sum())


def mean_of_known(values: list[float | None]) -> float | None:
    """The mean of the values that are defined; None if none is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _ranking(area: Callable[[Array, Array], float | None]) -> Callable[[Judged, Array], float | None]:
    def figure(judged: Judged, rows: Array) -> float | None:
        classes = range(judged.classes) if judged.positive is None else [judged.positive]
        return mean_of_known([area(*judged.ranked(rows, of)) for of in classes])

    return figure


def _rate(name: str) -> Callable[[Judged, Array], float | None]:
    def figure(judged: Judged, rows: Array) -> float | None:
        found = rates(judged, rows)
        chosen = found if judged.positive is None else [found[judged.positive]]
        return mean_of_known([row[name] for row in chosen])

    return figure


def calibration_error(judged: Judged, rows: Array, bins: int = CALIBRATION_BINS) -> float | None:
    """The expected calibration error: the mean over rows of |accuracy - confidence| of the bin of a row.

    Confidence is the probability of the predicted class; bins ((i - 1) / bins, i / bins] have equal widths.
    """
    chosen = judged.predicted[rows]
    if not len(chosen):
        return None
    confidence = judged.probabilities[rows, chosen]
    right = (chosen == judged.labels[rows]).astype(np.float64)
    number = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = np.bincount(number, weights=right - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(chosen))


def brier_score(judged: Judged, rows: Array) -> float | None:
    """The mean over rows of the sum over classes of (probability - 1 if it is the label else 0) squared."""
    labels = judged.labels[rows]
    errors = judged.probabilities[rows].copy()
    errors[np.arange(len(labels)), labels] -= 1
    return ratio(float(np.square(errors).sum()), len(labels))


CLASS_FIGURES: Mapping[str, Callable[[Judged, Array], float | None]] = {
    "auroc": _ranking(area_under_roc),
    "average_precision": _ranking(precision_over_recall),
    "sensitivity": _rate("recall"),
    "specificity": _rate("specificity"),
    "calibration_error": calibration_error,
    "brier": brier_score,
}
OF_TWO_CLASSES = ("sensitivity", "specificity")  # which need two classes, or one that is positive


def rates(judged: Judged, rows: Array) -> list[dict[str, Any]]:
    """Precision, recall (sensitivity), specificity, F1 and support of every class."""
    labels, predicted = judged.labels[rows], judged.predicted[rows]
    groups = (labels[labels == predicted], labels, predicted)
    counts = (np.bincount(group, minlength=judged.classes).tolist() for group in groups)
    found: list[dict[str, Any]] = []
    for right, support, chosen in zip(*counts, strict=True):
        others = len(labels) - support
        found.append(
            {
                "precision": ratio(right, chosen),
                "recall": ratio(right, support),
                "specificity": ratio(others - (chosen - right), others),
                "f1": ratio(2 * right, support + chosen),
                "support": support,
            }
        )
    return found


def of_classes(judged: Judged, rows: Array) -> list[dict[str, Any]]:
    """The rates of every class, and its AUROC and average precision against all others."""
    found = rates(judged, rows)
    for number, row in enumerate(found):
        counts = judged.ranked(rows, number)
        row |= {"auroc": area_under_roc(*counts), "average_precision": precision_over_recall(*counts)}
    return found


def most_confused(confusion: Array, most: int) -> list[tuple[int, int, int]]:
    """The pairs (label, other prediction, rows) with the most rows, at most so many."""
    wrong = np.array(confusion)
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
    return [(int(i), int(j), int(wrong[i, j])) for i, j in pairs if wrong[i, j]]
