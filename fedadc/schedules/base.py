"""The base class of schedules. The learning rate is constant after the horizon, so a run can be extended."""

from __future__ import annotations

from dataclasses import dataclass

from fedadc.errors import require
from fedadc.fields.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Schedule(Settings):
    """A factor on the learning rate for every round, counted from 1; subclass it and write `factor`."""

    horizon: int | None = None  # in rounds; None: the number of rounds with which the run first starts

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.horizon is None or 1 <= self.horizon <= 10**9,
            f"horizon must be at least 1 and at most 10^9, not {self.horizon}.",
        )

    def factor(self, elapsed: int, horizon: int) -> float:
        """The factor after `elapsed` finished rounds, which are at most `horizon`."""
        return 1.0

    def __call__(self, round: int, rounds: int) -> float:
        horizon = self.horizon or rounds
        return self.factor(min(round - 1, horizon), horizon)


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The same learning rate in every round."""
