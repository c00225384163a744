"""Test metrics of a model: fixed cuts, float64 sums added in order, so that no figure depends on who computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from fedadc.data.batches import Inputs
from fedadc.data.dataset import Array, Clients, Samples
from fedadc.errors import FedadcError, require, unknown
from fedadc.exact import exact
from fedadc.federation.ensembling import Ensembles
from fedadc.federation.rounds import Metrics as Metrics
from fedadc.federation.rounds import Round, RunState
from fedadc.methods.base import Method, Vector, state_of, vector_like
from fedadc.models.flat import FlatModel
from fedadc.rng import torch_seeded

EXTRA_METRICS = ("top5", "macro_f1", "per_class")
JUDGED_BY = ("validation_accuracy", "test_accuracy", "validation_personal_accuracy", "personal_accuracy")


@dataclass(frozen=True)
class Evaluation:
    """When and what to measure; none of it touches training."""

    every: int = 1  # rounds; the last round is always evaluated
    metrics: tuple[str, ...] = ()  # beside accuracy and loss: top5, macro_f1, per_class
    batch_size: int = 500
    overlap: bool = False  # with the next round's training, by workers that would be idle; records come a round later

    def __post_init__(self) -> None:
        require(self.every >= 1, f"evaluate.every must be at least 1, not {self.every}.")
        require(self.batch_size >= 1, f"evaluate.batch_size must be at least 1, not {self.batch_size}.")
        for name in self.metrics:
            if name not in EXTRA_METRICS:
                raise unknown("evaluate.metrics: metric", name, EXTRA_METRICS)


@dataclass(frozen=True)
class Cut:
    """The samples of one forward pass. Splits are cut at fixed places, whoever measures them."""

    split: str
    start: int
    stop: int


@dataclass(frozen=True)
class Tally:
    """What was counted on one cut."""

    split: str
    loss: float  # a sum
    top5: int
    confusion: Array  # int64 [true, predicted]


@dataclass(frozen=True)
class Examiner:
    """Counts what a model says, cut by cut, and makes metrics of the counts."""

    model: FlatModel
    splits: dict[str, Samples]
    inputs: Inputs
    classes: int
    evaluation: Evaluation

    def cuts(self) -> list[Cut]:
        size = self.evaluation.batch_size
        return [
            Cut(split, start, min(start + size, len(samples)))
            for split, samples in self.splits.items()
            for start in range(0, len(samples), size)
        ]

    def tally(self, theta: Tensor, cut: Cut, order: Array | None = None) -> Tally:
        """On one cut of a split, or of its samples in another order."""
        chosen = np.arange(cut.start, cut.stop) if order is None else order[cut.start : cut.stop]
        x, y = self.inputs.gather(self.splits[cut.split], chosen)
        with torch_seeded(0, "evaluation", client=cut.start):  # of a model that is random even now
            logits = self.model.predict(theta, x)
        loss = float(F.cross_entropy(logits, y, reduction="none").cpu().double().sum())
        pairs = (y * self.classes + logits.argmax(dim=1)).cpu().numpy()
        confusion = np.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)
        best = logits.topk(min(5, self.classes), dim=1).indices
        return Tally(cut.split, loss, int((best == y[:, None]).any(dim=1).sum()), confusion)

    def metrics(self, tallies: Iterable[Tally]) -> dict[str, Metrics]:
        """Accuracy and cross-entropy per split, and what else `evaluation.metrics` names; tallies add up in order."""
        of_split: dict[str, list[Tally]] = {split: [] for split in self.splits}
        for tally in tallies:
            of_split[tally.split].append(tally)
        return {split: self._metrics(found) for split, found in of_split.items() if found}

    def _metrics(self, tallies: Sequence[Tally]) -> Metrics:
        wanted, confusion = self.evaluation.metrics, sum(t.confusion for t in tallies)
        assert isinstance(confusion, np.ndarray)
        n, right = int(confusion.sum()), np.diag(confusion)
        metrics: Metrics = {"accuracy": float(right.sum()) / n, "loss": sum(t.loss for t in tallies) / n}
        if "top5" in wanted:
            metrics["top5"] = sum(t.top5 for t in tallies) / n
        if "macro_f1" in wanted:
            both = confusion.sum(axis=0) + confusion.sum(axis=1)
            metrics["macro_f1"] = float(np.mean(2 * right[both > 0] / both[both > 0]))  # classes that occur at all
        if "per_class" in wanted:
            totals = confusion.sum(axis=1)
            metrics["per_class"] = [float(r / t) if t else None for r, t in zip(right, totals, strict=True)]
        return metrics

    def __call__(self, theta: Tensor) -> dict[str, Metrics]:
        with exact():
            return self.metrics(self.tally(theta, cut) for cut in self.cuts())


def models_of(method: Method, ensembles: Ensembles, state: RunState) -> dict[str, Vector]:
    """The global models of a state by name, first the one by which its run is judged; none if nothing is federated."""
    if not method.federated:
        return {}
    source = f"{type(method).__name__}.evaluated"
    models = state_of(method.evaluated(state.theta, state.server), source)
    require(bool(models), f"{source} must return at least one model.")
    averages = {name: state.server[name] for name in ensembles.averages}
    for name in models.keys() & averages.keys():
        raise FedadcError(f"{source} has a model {name!r}, which is the name of an ensemble; rename it.")
    models = {**models, **averages}
    return {name: vector_like(vector, state.theta, source) for name, vector in models.items()}


@dataclass(frozen=True)
class Evaluator:
    """Measures a stream of rounds on every split that is not for training."""

    method: Method
    ensembles: Ensembles
    clients: int  # N
    examiner: Examiner
    measure: Callable[[Vector, Sequence[Cut]], Iterable[Tally]]  # an engine's
    shares: Mapping[str, Clients] = field(default_factory=dict)  # of each split, whose samples are each client's own

    def __call__(self, state: RunState) -> Metrics:
        """Metrics of the model by which a run is judged; of its other ones and of the clients' own, named in front."""
        metrics: Metrics = {} if self.method.federated else self._mean_of_clients(state)
        for name, theta in self._judged(state).items():
            prefix = f"{name}_" if metrics else ""
            metrics |= {prefix + key: value for key, value in self.of_model(theta).items()}
        return metrics | self.of_clients(state)

    def begun(self, state: RunState) -> Callable[[], Metrics]:
        """The same, to be asked for later: an engine may count in the meantime."""
        models = self._judged(state)
        if len(models) != 1:
            return lambda: self(state)
        tallies = self.measure(next(iter(models.values())), self.examiner.cuts())
        return lambda: self._named(tallies) | self.of_clients(state)

    def _judged(self, state: RunState) -> dict[str, Vector]:
        return {} if self.method.headless else models_of(self.method, self.ensembles, state)

    def of_clients(self, state: RunState) -> Metrics:
        """Over all samples of the clients' shares, each by the own model of the client whose it is."""
        with exact():
            splits = self.examiner.metrics(self._tallies_of_clients(state))
        named = {f"{split}_personal_{name}": value for split, found in splits.items() for name, value in found.items()}
        return {name.removeprefix("test_"): value for name, value in named.items()}

    def _tallies_of_clients(self, state: RunState) -> Iterator[Tally]:
        size = self.examiner.evaluation.batch_size
        for split, shares in self.shares.items():
            for client in np.flatnonzero(shares.sizes).tolist():
                own = state.clients[client] if client in state.clients else self.method.client_state(state.theta)
                theta = self.method.personal(state.theta, own)
                first, end = shares.offsets[client : client + 2].tolist()
                for start in range(first, end, size):
                    yield self.examiner.tally(theta, Cut(split, start, min(start + size, end)), shares.indices)

    def _mean_of_clients(self, state: RunState) -> Metrics:
        """The mean over all clients of the metrics of their own models."""
        never = self.clients - len(state.clients)  # selected: these are all at the start
        total = [(never, self.of_model(state.theta))] if never else []
        for client in state.clients.values():
            total.append((1, self.of_model(self.method.personal(state.theta, client))))
        weights = [weight for weight, _ in total]
        return {key: _mean(weights, [metrics[key] for _, metrics in total]) for key in total[0][1]}

    def of_model(self, theta: Tensor) -> Metrics:
        return self._named(self.measure(theta, self.examiner.cuts()))

    def _named(self, tallies: Iterable[Tally]) -> Metrics:
        splits = self.examiner.metrics(tallies)
        return {f"{split}_{name}": value for split, metrics in splits.items() for name, value in metrics.items()}

    def follow(self, stream: Iterable[Round], last: int) -> Iterator[Round]:
        """The same rounds, with metrics where they are due; a round later where evaluation and training overlap."""
        held: Callable[[], Round] | None = None  # a round whose evaluation goes on
        for result in stream:
            if held is not None:
                yield held()
            held = self._begun(result, last)
            if not self.examiner.evaluation.overlap:
                yield held()
                held = None
        if held is not None:
            yield held()

    def _begun(self, result: Round, last: int) -> Callable[[], Round]:
        due = result.round % self.examiner.evaluation.every == 0 or result.round == last
        if not due or not self.examiner.splits:
            return lambda: result
        metrics = self.begun(result.state)
        return lambda: replace(result, metrics=metrics())


def _mean(weights: list[int], values: list[Any]) -> float | list[float | None]:
    """A weighted mean, entry by entry where the values are lists."""
    mean = np.average(np.array(values, dtype=float), axis=0, weights=weights)  # None becomes NaN
    return float(mean) if mean.ndim == 0 else [None if np.isnan(v) else float(v) for v in mean]


def until(stream: Iterable[Round], accuracy: float | None) -> Iterator[Round]:
    """End after the first round that reaches an accuracy: on validation data where there is some, else on test data.

    Of the clients' own models, where there is no global one.
    """
    for result in stream:
        yield result
        if reaches(result.metrics, accuracy):
            return


def reaches(metrics: Mapping[str, Any], accuracy: float | None) -> bool:
    value = next((metrics[name] for name in JUDGED_BY if name in metrics), None)
    return accuracy is not None and isinstance(value, float) and value >= accuracy
