"""When a run ends early, and which of its models was the best: both follow from its records alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedadc.errors import require
from fedadc.evaluation.fairness import FAIRNESS, FAIRNESS_LOWER_IS_BETTER, fairness_metrics
from fedadc.evaluation.metrics import Evaluation
from fedadc.fields.settings import Settings
from fedadc.methods.base import Method
from fedadc.tasks import JUDGED_BY, LOWER_IS_BETTER, Classification, Task
from fedadc.training.state import Round

VALIDATION = "validation"
SMALL_IS_GOOD = (
    "drift_distance",
    "drift_spread",
    *FAIRNESS_LOWER_IS_BETTER,
    "calibration_error",
    "brier",
)  # beside losses


@dataclass(frozen=True, kw_only=True)
class Stopping(Settings):
    """When to stop before the last round."""

    accuracy: float | None = None  # of the validation data if there is any, else of the test data
    patience: int | None = None  # evaluations in a row without an improvement on validation data
    min_delta: float = 0.0  # an improvement over the last one that counted is larger than this
    metric: str | None = None  # of validation data; None: the one by which a run is judged there

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.accuracy is None or 0 < self.accuracy <= 1, f"accuracy must be in (0, 1], not {self.accuracy}.")
        require(self.patience is None or self.patience >= 1, f"patience must be at least 1, not {self.patience}.")
        require(0 <= self.min_delta < math.inf, f"min_delta must be at least 0 and finite, not {self.min_delta}.")
        require(
            self.metric is None or self.metric.startswith(f"{VALIDATION}_"),
            f"metric must be one of validation data, such as validation_loss, not {self.metric!r:.60}.",
        )


def higher_is_better(metric: str) -> bool:
    """Whether a larger value of a metric is the better one."""
    return not metric.endswith((*LOWER_IS_BETTER, *SMALL_IS_GOOD))


def validation_metrics(method: Method, evaluation: Evaluation, task: type[Task] = Classification) -> list[str]:
    """The names of the numbers that a run measures on validation data, without those of its ensembles."""
    extra = {name for name in evaluation.metrics if name != FAIRNESS and not name.startswith("per_")}
    measured = {*task.always, *extra, *(fairness_metrics(task) if FAIRNESS in evaluation.metrics else ())}
    names = (set() if method.headless else measured) | {f"personal_{m}" for m in measured if method.personalized}
    return sorted(f"{VALIDATION}_{name}" for name in names)


@dataclass
class BestValue:
    """The best value of a metric over the evaluations so far, and for how many evaluations it has not improved.

    An improvement is larger than `min_delta` over the last one that counted; the best value may be a smaller step.
    """

    metric: str | None = None  # None: the metric by which a run is judged on validation data
    min_delta: float = 0.0
    round: int = 0  # of the best value; 0: there is none
    value: float = math.nan
    counted: float = math.nan  # the value of the last improvement
    since: int = 0

    def see(self, round: int, metrics: Mapping[str, Any]) -> bool:
        """Take note of an evaluation; True if it is the best one so far. One without the metric is no improvement."""
        if not any(name.startswith(f"{VALIDATION}_") for name in metrics):
            return False  # validation data was not evaluated
        if self.metric is None:
            self.metric = next((name for name in JUDGED_BY if name.startswith(VALIDATION) and name in metrics), None)
        value = None if self.metric is None else metrics.get(self.metric)  # None where it is not finite
        self.since += 1
        if not isinstance(value, float) or not math.isfinite(value):
            return False
        first = not self.round
        if first or self._gain(value, self.counted) > self.min_delta:
            self.counted, self.since = value, 0
        if not first and self._gain(value, self.value) <= 0:
            return False
        self.round, self.value = round, value
        return True

    def _gain(self, value: float, before: float) -> float:
        higher = self.metric is None or higher_is_better(self.metric)
        return value - before if higher else before - value

    def __str__(self) -> str:
        by = f" by more than {self.min_delta:g} over {self.counted:.4g}" if self.min_delta and self.round else ""
        evaluations = "1 evaluation" if self.since == 1 else f"{self.since} evaluations"
        best = f"best {self.value:.4g} at round {self.round}" if self.round else "it never had a finite value"
        return f"{self.metric or 'the score of validation data'} has not improved{by} for {evaluations} ({best})"


class Stopper:
    """Decides after every round of a run, from its first one on, whether the run ends early.

    Evaluations that a run in one go would not have made, such as of the last round before it was prolonged, do not
    count for patience. So a run ends at the same round whether or not it was interrupted.
    """

    def __init__(self, stop: Stopping, evaluation: Evaluation, rounds: int) -> None:
        self.stop, self.evaluation, self.rounds = stop, evaluation, rounds
        self.best, self._last = BestValue(stop.metric, stop.min_delta), dict[str, Any]()

    def see(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Take note of the metrics of a round."""
        self._last = dict(metrics)
        if self.evaluation.due(round, self.rounds):
            self.best.see(round, metrics)

    @property
    def reason(self) -> str:
        """Why the run ends after the round that was seen last; empty if it does not."""
        if reaches(self._last, self.stop.accuracy):
            return f"reached accuracy {self.stop.accuracy}"
        patience = self.stop.patience
        return str(self.best) if patience is not None and self.best.since >= patience else ""

    def follow(self, stream: Iterable[Round]) -> Iterator[Round]:
        """The same rounds, to the one after which the run ends early; that one says why."""
        if self.reason:
            return
        for result in stream:
            self.see(result.round, result.metrics)
            if reason := self.reason:
                yield replace(result, stopped=reason)
                return
            yield result


def stop_reason(stop: Stopping, evaluation: Evaluation, rounds: int, records: Iterable[Mapping[str, Any]]) -> str:
    """Why a run with these records has ended early; empty if it has not."""
    stopper = Stopper(stop, evaluation, rounds)
    for record in records:
        stopper.see(record["round"], record)
    return stopper.reason


def reaches(metrics: Mapping[str, Any], accuracy: float | None) -> bool:
    """Whether the accuracy by which a run is judged, on validation data where there is some, is at least this one."""
    value = next((metrics[name] for name in JUDGED_BY if name in metrics), None)
    return accuracy is not None and isinstance(value, float) and value >= accuracy
