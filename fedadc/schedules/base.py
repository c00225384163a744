"""The learning rate over rounds. Every schedule ends at its horizon and stays there, so a run can be prolonged."""

from __future__ import annotations

from dataclasses import dataclass

from fedadc.errors import require


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A factor on `local.lr` per round; subclass it and write `factor`. Rounds count from 1."""

    horizon: int | None = None  # rounds; None: the run's own number of rounds when it first starts

    def __post_init__(self) -> None:
        require(
            self.horizon is None or 1 <= self.horizon <= 10**9,
            f"schedule: horizon must be at least 1 and at most 10^9, not {self.horizon}.",
        )

    def factor(self, elapsed: int, horizon: int) -> float:
        """The factor after so many finished rounds, at most `horizon`."""
        return 1.0

    def __call__(self, round: int, rounds: int) -> float:
        horizon = self.horizon or rounds
        return self.factor(min(round - 1, horizon), horizon)


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The same learning rate in every round."""
