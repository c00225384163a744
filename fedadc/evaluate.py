"""Test metrics of a model: fixed cuts, float64 sums added in order, so that no figure depends on who computes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from fedadc.data.batches import Inputs
from fedadc.data.dataset import Samples
from fedadc.errors import require, unknown
from fedadc.exact import exact
from fedadc.federation.rounds import Metrics as Metrics
from fedadc.federation.rounds import Round, RunState
from fedadc.methods.base import Method, Vector, state_of, vector_like
from fedadc.models.flat import FlatModel

EXTRA_METRICS = ("top5", "macro_f1", "per_class")


@dataclass(frozen=True)
class Evaluation:
    """When and what to measure; none of it touches training."""

    every: int = 1  # rounds; the last round is always evaluated
    metrics: tuple[str, ...] = ()  # beside accuracy and loss: top5, macro_f1, per_class
    batch_size: int = 500

    def __post_init__(self) -> None:
        require(self.every >= 1, f"evaluate.every must be at least 1, not {self.every}.")
        require(self.batch_size >= 1, f"evaluate.batch_size must be at least 1, not {self.batch_size}.")
        for name in self.metrics:
            if name not in EXTRA_METRICS:
                raise unknown("evaluate.metrics: metric", name, EXTRA_METRICS)


def measure(
    model: FlatModel, theta: Tensor, samples: Samples, inputs: Inputs, classes: int, evaluation: Evaluation
) -> Metrics:
    """Accuracy and cross-entropy of theta on some samples, and what else `evaluation.metrics` names."""
    loss = top5 = 0.0
    confusion = np.zeros((classes, classes), dtype=np.int64)  # [true, predicted]
    with exact():
        for start in range(0, len(samples), evaluation.batch_size):
            cut = np.arange(start, min(start + evaluation.batch_size, len(samples)))
            x, y = inputs.gather(samples, cut)
            logits = model.predict(theta, x)
            loss += float(F.cross_entropy(logits, y, reduction="none").cpu().double().sum())
            predicted = logits.argmax(dim=1).cpu().numpy()
            confusion += np.bincount(y.cpu().numpy() * classes + predicted, minlength=classes**2).reshape(
                confusion.shape
            )
            if "top5" in evaluation.metrics:
                best = logits.topk(min(5, classes), dim=1).indices
                top5 += float((best == y[:, None]).any(dim=1).sum())
    n, right = len(samples), np.diag(confusion)
    metrics: Metrics = {"accuracy": float(right.sum()) / n, "loss": loss / n}
    if "top5" in evaluation.metrics:
        metrics["top5"] = top5 / n
    if "macro_f1" in evaluation.metrics:
        both = confusion.sum(axis=0) + confusion.sum(axis=1)
        metrics["macro_f1"] = float(np.mean(2 * right[both > 0] / both[both > 0]))  # classes that occur at all
    if "per_class" in evaluation.metrics:
        totals = confusion.sum(axis=1)
        metrics["per_class"] = [float(r / t) if t else None for r, t in zip(right, totals, strict=True)]
    return metrics


def models_of(method: Method, state: RunState) -> dict[str, Vector]:
    """The global models of a state by name, first the one by which its run is judged; none if nothing is federated."""
    if not method.federated:
        return {}
    source = f"{type(method).__name__}.evaluated"
    models = state_of(method.evaluated(state.theta, state.server), source)
    require(bool(models), f"{source} must return at least one model.")
    return {name: vector_like(vector, state.theta, source) for name, vector in models.items()}


@dataclass(frozen=True)
class Evaluator:
    """Measures a stream of rounds on every split that is not for training."""

    model: FlatModel
    method: Method
    splits: dict[str, Samples]
    inputs: Inputs
    classes: int
    clients: int  # N
    evaluation: Evaluation

    def __call__(self, state: RunState) -> Metrics:
        """Metrics of the model by which a run is judged, and of its other ones with their names in front."""
        if not self.method.federated:
            return self._mean_of_clients(state)
        metrics: Metrics = {}
        for name, theta in models_of(self.method, state).items():
            prefix = f"{name}_" if metrics else ""
            metrics |= {prefix + key: value for key, value in self.of_model(theta).items()}
        return metrics

    def _mean_of_clients(self, state: RunState) -> Metrics:
        """The mean over all clients of the metrics of their own models."""
        never = self.clients - len(state.clients)  # selected: these are all at the start
        total = [(never, self.of_model(state.theta))] if never else []
        for client in state.clients.values():
            total.append((1, self.of_model(self.method.personal(state.theta, client))))
        weights = [weight for weight, _ in total]
        return {key: _mean(weights, [metrics[key] for _, metrics in total]) for key in total[0][1]}

    def of_model(self, theta: Tensor) -> Metrics:
        splits = self.by_split(theta)
        return {f"{split}_{name}": value for split, metrics in splits.items() for name, value in metrics.items()}

    def by_split(self, theta: Tensor) -> dict[str, Metrics]:
        return {
            split: measure(self.model, theta, samples, self.inputs, self.classes, self.evaluation)
            for split, samples in self.splits.items()
        }

    def follow(self, stream: Iterable[Round], last: int) -> Iterator[Round]:
        """The same rounds, with metrics where they are due."""
        for result in stream:
            due = result.round % self.evaluation.every == 0 or result.round == last
            yield replace(result, metrics=self(result.state)) if due and self.splits else result


def _mean(weights: list[int], values: list[Any]) -> float | list[float | None]:
    """A weighted mean, entry by entry where the values are lists."""
    mean = np.average(np.array(values, dtype=float), axis=0, weights=weights)  # None becomes NaN
    return float(mean) if mean.ndim == 0 else [None if np.isnan(v) else float(v) for v in mean]


def until(stream: Iterable[Round], accuracy: float | None) -> Iterator[Round]:
    """End after the first round that reaches an accuracy: on validation data where there is some, else on test data."""
    for result in stream:
        yield result
        if reaches(result.metrics, accuracy):
            return


def reaches(metrics: Mapping[str, Any], accuracy: float | None) -> bool:
    value = metrics.get("validation_accuracy", metrics.get("test_accuracy"))
    return accuracy is not None and isinstance(value, float) and value >= accuracy
