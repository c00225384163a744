"""The state that a run carries from round to round, and the result of one round."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedadc.communication.ledger import Ledger
from fedadc.fields.summary import field_summary, summary
from fedadc.models.vectors import State, Vector
from fedadc.training.client_states import ClientStates

Metrics = dict[str, float | list[float | None] | None]


@dataclass(frozen=True)
class RunState:
    """Everything that a run carries from one round to the next."""

    round: int  # finished rounds
    theta: Vector
    server: State
    clients: ClientStates  # of the clients that have a state
    horizon: int = 0  # of schedules without a horizon of their own: the rounds asked for when the run first started
    links: State = field(default_factory=dict)  # state of the network: what each client has received, virtual time

    __repr__ = field_summary


@dataclass(frozen=True)
class Round:
    """The result of one round. `state` is the run after it."""

    round: int  # t, from 1
    lr: float
    train_loss: float  # mean over the counted clients of the mean over local steps
    cohort: tuple[int, ...]
    ledger: Ledger  # bytes sent
    samples: int  # used by the clients that reported
    seconds: float  # of training
    state: RunState
    metrics: Metrics = field(default_factory=dict)  # test_accuracy, test_loss, ... where evaluated
    dropped: tuple[int, ...] = ()  # clients that never reported (`faults.drop`)
    slow: tuple[int, ...] = ()  # clients that did fewer steps (`faults.slow`)
    skipped: tuple[int, ...] = ()  # clients whose updates were not finite
    joined: tuple[int, ...] = ()  # clients that joined before this round (real sites)
    absent: tuple[int, ...] = ()  # clients that could not be chosen (real sites)
    events: tuple[str, ...] = ()  # e.g. a worker that died
    stopped: str = ""  # why the run ends early after this round

    def __repr__(self) -> str:
        first = {"round": self.round, "lr": self.lr, "train_loss": self.train_loss, **self.metrics}
        sent = {"cohort": self.cohort, "bytes_up": self.bytes_up, "bytes_down": self.bytes_down}
        rest = {name: getattr(self, name) for name in ("seconds", "dropped", "slow", "skipped", "events", "stopped")}
        return summary("Round", first | sent | rest)

    @property
    def bytes_up(self) -> int:
        """Bytes of all uploads."""
        return self.ledger.bytes_up

    @property
    def bytes_down(self) -> int:
        return self.ledger.bytes_down

    @property
    def virtual_seconds(self) -> float | None:
        """Virtual time at the end of the round; None without a clock."""
        return float(self.state.links["now"]) if "now" in self.state.links else None

    @property
    def test_accuracy(self) -> float | None:
        value = self.metrics.get("test_accuracy")
        return value if isinstance(value, float) else None
