"""Settings of local training, the same for every client and every method."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedadc.data.batches import count_samples, count_steps
from fedadc.data.dataset import Array
from fedadc.errors import require
from fedadc.schedules import Constant, Schedule

MOST = 10**9  # rounds, steps, samples: more than anybody means


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """What every client does whatever the method."""

    steps: int | None = None  # H, exactly; or
    epochs: int | None = None  # passes over the client's own data (1 if neither is given)
    batch_size: int = 32
    lr: float = 0.1  # η of the first round; a schedule changes it from round to round
    weight_decay: float = 0.0  # coupled: added to the gradient
    momentum: float = 0.0  # v = momentum * v + g, from zero in every client's round
    clip: float | None = None  # the largest norm of the loss gradient
    schedule: Schedule = field(default_factory=Constant)

    def __post_init__(self) -> None:
        require(
            self.steps is None or self.epochs is None,
            "give local.steps or local.epochs, not both (null switches one off).",
        )
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "epochs", 1)
        for name in ("steps", "epochs", "batch_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"local.{name} must be at least 1, not {value}.")
            require(value is None or value <= MOST, f"local.{name} must be at most {MOST}, not {value}.")
        require(0 < self.lr <= 1e30, f"local.lr must be positive and at most 1e30, not {self.lr}.")
        require(
            0 <= self.weight_decay < float("inf"), f"local.weight_decay must not be negative, not {self.weight_decay}."
        )
        require(0 <= self.momentum < 1, f"local.momentum must lie in [0, 1), not {self.momentum}.")
        require(self.clip is None or self.clip > 0, f"local.clip must be positive, not {self.clip}.")

    def lr_of(self, round: int, rounds: int) -> float:
        """η_t of round t of a run of so many rounds."""
        return self.lr * self.schedule(round, rounds)

    def count_steps(self, sizes: Array) -> Array:
        """H of clients with so many samples."""
        return count_steps(sizes, self.batch_size, self.steps, self.epochs)

    def count_samples(self, sizes: Array, steps: Array) -> int:
        """How many samples clients with so many use in so many steps each; a sample used twice counts twice."""
        return int(count_samples(sizes, self.batch_size, self.epochs, steps).sum())
