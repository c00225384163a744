"""The learning rate over rounds. Every schedule ends at its horizon and stays there, so a run can be prolonged."""

from __future__ import annotations

import math
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


@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """Times `gamma` after every `every` rounds."""

    every: int = 100
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every >= 1, f"schedule step: every must be at least 1, not {self.every}.")
        require(0 < self.gamma <= 1, f"schedule step: gamma must lie in (0, 1], not {self.gamma}.")

    def factor(self, elapsed: int, horizon: int) -> float:
        return float(self.gamma ** (elapsed // self.every))


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from 1 down to `final` at the horizon."""

    final: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.final <= 1, f"schedule cosine: final must lie in (0, 1], not {self.final}.")

    def factor(self, elapsed: int, horizon: int) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * elapsed / horizon)) / 2


@dataclass(frozen=True, kw_only=True)
class Exponential(Schedule):
    """Times `gamma` after every round."""

    gamma: float = 0.998

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.gamma <= 1, f"schedule exponential: gamma must lie in (0, 1], not {self.gamma}.")

    def factor(self, elapsed: int, horizon: int) -> float:
        return float(self.gamma**elapsed)


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "step": Step,
    "cosine": Cosine,
    "exponential": Exponential,
}
