"""The settings of local training, which are the same for all clients and methods."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fedadc.data.batches import count_samples, count_steps
from fedadc.data.dataset import Array
from fedadc.errors import require
from fedadc.fields.settings import Settings
from fedadc.optimizers import SGD, Optimizer
from fedadc.schedules import Constant, Schedule

MOST = 10**9  # the upper limit of rounds, steps, epochs and batch sizes, to catch typing errors


@dataclass(frozen=True, kw_only=True)
class LocalWork(Settings):
    """How much and how every client trains in a round, with any method."""

    steps: int | None = None  # H, the exact number of steps; or
    epochs: int | None = None  # passes over the client's own data (1 if neither is given)
    batch_size: int = 32
    lr: float = 0.1  # η of the first round; a schedule changes it from round to round
    weight_decay: float = 0.0  # coupled: added to the gradient
    momentum: float = 0.0  # v = momentum * v + g; v starts at zero in every client's round
    optimizer: Optimizer = field(default_factory=SGD)  # how gradients become steps
    clip: float | None = None  # the largest norm of the loss gradient
    schedule: Schedule = field(default_factory=Constant)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps is None or self.epochs is None, "set steps or epochs, not both; leave the other one empty.")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "epochs", 1)
        for name in ("steps", "epochs", "batch_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, not {value}.")
            require(value is None or value <= MOST, f"{name} must be at most {MOST}, not {value}.")
        require(0 < self.lr <= 1e30, f"lr must be positive and at most 1e30, not {self.lr}.")
        require(
            0 <= self.weight_decay < math.inf, f"weight_decay must be at least 0 and finite, not {self.weight_decay}."
        )
        require(0 <= self.momentum < 1, f"momentum must be in [0, 1), not {self.momentum}.")
        require(
            self.momentum == 0 or self.optimizer.plain,
            f"momentum is {self.momentum}, but {type(self.optimizer).__name__} has moments of its own; set momentum "
            "to 0.",
        )
        require(self.clip is None or self.clip > 0, f"clip must be positive, not {self.clip}.")

    def lr_of(self, round: int, rounds: int) -> float:
        """η_t, the learning rate of a round in a run with `rounds` rounds."""
        return self.lr * self.schedule(round, rounds)

    def count_steps(self, sizes: Array) -> Array:
        """H, the number of local steps, of clients with the given numbers of samples."""
        return count_steps(sizes, self.batch_size, self.steps, self.epochs)

    def smallest_batch(self, sizes: Array) -> Array:
        """The number of samples of the smallest batch, of clients with the given numbers of samples."""
        full = np.minimum(self.batch_size, sizes)
        rest = sizes % full
        return np.asarray(np.where((rest > 0) & (self.steps is None), rest, full))

    def count_samples(self, sizes: Array, steps: Array) -> int:
        """The number of samples that clients of these sizes use in these steps; a sample used twice counts twice."""
        return int(count_samples(sizes, self.batch_size, self.epochs, steps).sum())
