"""Exponential decay: the learning rate is multiplied by a factor after every round."""

from __future__ import annotations

from dataclasses import dataclass

from fedadc.errors import require
from fedadc.schedules.base import Schedule


@dataclass(frozen=True, kw_only=True)
class Exponential(Schedule):
    """The learning rate is multiplied by `gamma` after every round."""

    gamma: float = 0.998

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.gamma <= 1, f"gamma must be in (0, 1], not {self.gamma}.")

    def factor(self, elapsed: int, horizon: int) -> float:
        return float(self.gamma**elapsed)
