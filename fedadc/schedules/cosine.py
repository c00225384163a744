"""Cosine decay: half a cosine from the first learning rate down to a share of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedadc.errors import require
from fedadc.schedules.base import Schedule


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from 1 down to `final` at the horizon."""

    final: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.final <= 1, f"final must be in (0, 1], not {self.final}.")

    def factor(self, elapsed: int, horizon: int) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * elapsed / horizon)) / 2
