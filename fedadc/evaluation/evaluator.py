"""Evaluates a stream of rounds: the global model, its averages, and the clients' own models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from fedadc.data.dataset import Clients
from fedadc.errors import FedadcError, require
from fedadc.evaluation.fairness import FAIRNESS_METRICS
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch, MetricCounter
from fedadc.methods.base import Method
from fedadc.models.vectors import Vector, state_of, vector_like
from fedadc.system.determinism import deterministic
from fedadc.training.ensembles import Ensembles
from fedadc.training.state import Metrics, Round, RunState


def models_of(method: Method, ensembles: Ensembles, state: RunState) -> dict[str, Vector]:
    """The global models of a state by name, first the judged one; {} if the method has no global model."""
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
    """Evaluates rounds on every split except training."""

    method: Method
    ensembles: Ensembles
    clients: int  # N
    counter: MetricCounter
    count: Callable[[Vector, Sequence[EvaluationBatch]], Iterable[BatchCounts]]  # an engine's
    shares: Mapping[str, Clients] = field(default_factory=dict)  # split -> which samples belong to which client

    def __call__(self, state: RunState) -> Metrics:
        """Metrics of the judged model; those of other models and of the clients' own have a prefix."""
        metrics: Metrics = {} if self.method.federated else self._mean_of_clients(state)
        for name, theta in self._judged(state).items():
            prefix = f"{name}_" if metrics else ""
            metrics |= {prefix + key: value for key, value in self.of_model(theta).items()}
        return metrics | self.of_clients(state)

    def start(self, state: RunState) -> Callable[[], Metrics]:
        """Start an evaluation and return a function that waits for it; an engine may count in the meantime."""
        models = self._judged(state)
        if len(models) != 1:
            return lambda: self(state)
        counts = self.count(next(iter(models.values())), self.counter.batches())
        return lambda: self._named(counts) | self.of_clients(state)

    def _judged(self, state: RunState) -> dict[str, Vector]:
        return {} if self.method.headless else models_of(self.method, self.ensembles, state)

    def of_clients(self, state: RunState) -> Metrics:
        """Metrics of the clients' own models, each on the client's own share, over all samples of all shares."""
        with deterministic():
            splits = self.counter.metrics(self._counts_of_clients(state))
        named = {f"{split}_personal_{name}": value for split, found in splits.items() for name, value in found.items()}
        return {name.removeprefix("test_"): value for name, value in named.items()}

    def _counts_of_clients(self, state: RunState) -> Iterator[BatchCounts]:
        size = self.counter.evaluation.batch_size
        for split, shares in self.shares.items():
            for client in np.flatnonzero(shares.sizes).tolist():
                own = state.clients[client] if client in state.clients else self.method.client_state(state.theta)
                theta = self.method.personal(state.theta, own)
                first, end = shares.offsets[client : client + 2].tolist()
                for start in range(first, end, size):
                    yield self.counter.count(
                        theta, EvaluationBatch(split, start, min(start + size, end)), shares.indices
                    )

    def _mean_of_clients(self, state: RunState) -> Metrics:
        """Metrics of the clients' own models on all samples, averaged over clients."""
        never = self.clients - len(state.clients)  # clients that were never selected: their models are the initial one
        total = [(never, self.of_model(state.theta))] if never else []
        for client in state.clients.values():
            total.append((1, self.of_model(self.method.personal(state.theta, client))))
        weights = [weight for weight, _ in total]
        keys = [key for key in total[0][1] if not key.endswith(FAIRNESS_METRICS)]  # `of_clients` has those
        return {key: _mean(weights, [metrics[key] for _, metrics in total]) for key in keys}

    def of_model(self, theta: Tensor) -> Metrics:
        return self._named(self.count(theta, self.counter.batches()))

    def _named(self, counts: Iterable[BatchCounts]) -> Metrics:
        splits = self.counter.metrics(counts)
        return {f"{split}_{name}": value for split, metrics in splits.items() for name, value in metrics.items()}

    def follow(self, stream: Iterable[Round], last: int) -> Iterator[Round]:
        """The same rounds, with metrics where they are due; one round later if evaluation and training overlap."""
        pending: Callable[[], Round] | None = None  # a round that is still being evaluated
        for result in stream:
            if pending is not None:
                yield pending()
            pending = self._started(result, last)
            if not self.counter.evaluation.overlap:
                yield pending()
                pending = None
        if pending is not None:
            yield pending()

    def _started(self, result: Round, last: int) -> Callable[[], Round]:
        if not self.counter.evaluation.due(result.round, last) or not self.counter.splits:
            return lambda: result
        metrics = self.start(result.state)
        return lambda: replace(result, metrics={**metrics(), **result.metrics})


def _mean(weights: list[int], values: list[Any]) -> float | list[float | None]:
    """A weighted mean, entry by entry where the values are lists."""
    mean = np.average(np.array(values, dtype=float), axis=0, weights=weights)  # None becomes NaN
    return float(mean) if mean.ndim == 0 else [None if np.isnan(v) else float(v) for v in mean]
