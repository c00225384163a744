"""The state that a run carries from round to round, and the result of one round."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedadc.communication.ledger import Ledger
from fedadc.models.vectors import State, Vector
from fedadc.training.client_states import ClientStates

Metrics = dict[str, float | list[float | None]]


@dataclass(frozen=True)
class RunState:
    """All that a run carries from one round to the next."""

    round: int  # finished rounds
    theta: Vector
    server: State
    clients: ClientStates  # of clients that have one
    horizon: int = 0  # of schedules that have none of their own: the rounds asked for when the run first started
    links: State = field(default_factory=dict)  # where communication stands: what clients have heard, virtual time


@dataclass(frozen=True)
class Round:
    """What one round did. `state` is the run after it."""

    round: int  # t, from 1
    lr: float
    train_loss: float  # mean over the counted clients of the mean over local steps
    cohort: tuple[int, ...]
    ledger: Ledger  # what traveled
    samples: int  # that the reporting clients used
    seconds: float  # of training
    state: RunState
    metrics: Metrics = field(default_factory=dict)  # test_accuracy, test_loss, ... where evaluated
    dropped: tuple[int, ...] = ()  # of the cohort, by `faults.drop`: they never reported
    slow: tuple[int, ...] = ()  # by `faults.slow`: they did fewer steps
    skipped: tuple[int, ...] = ()  # their updates were not finite
    events: tuple[str, ...] = ()  # what else happened: a worker that died

    @property
    def bytes_up(self) -> int:
        """Over all that reported."""
        return self.ledger.bytes_up

    @property
    def bytes_down(self) -> int:
        return self.ledger.bytes_down

    @property
    def virtual_seconds(self) -> float | None:
        """At its end, by the clock of the run if it has one."""
        return float(self.state.links["now"]) if "now" in self.state.links else None

    @property
    def test_accuracy(self) -> float | None:
        value = self.metrics.get("test_accuracy")
        return value if isinstance(value, float) else None
