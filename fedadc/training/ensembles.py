"""Temporal ensembles: averages of the global models over rounds (section IV-E of the paper).

Each is one more vector at the server, under its name among the server's state: it is evaluated beside the plain model,
saved with it, and sent along where an objective names it as its teacher. Training itself does not change, unless
Lookahead has `reset` set.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

from fedadc.errors import require
from fedadc.fields.settings import Settings
from fedadc.models.vectors import State, Vector


class Average(Protocol):
    def follow(self, average: Vector, theta: Vector, round: int) -> Vector:
        """The average once theta is the global model after a round; a new vector."""


@dataclass(frozen=True, kw_only=True)
class SWA(Settings):
    """The plain mean of the global models after rounds start, start + every, ... (Izmailov et al., 2018)."""

    start: int = 1  # before this round, the average is the global model itself
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_round("start", self.start)
        _require_round("every", self.every)

    def follow(self, average: Vector, theta: Vector, round: int) -> Vector:
        if round <= self.start:
            return theta.clone()
        models, between = divmod(round - self.start, self.every)  # models in the average so far
        return average if between else average + (theta - average) / (models + 1)


@dataclass(frozen=True, kw_only=True)
class EMA(Settings):
    """average = decay average + (1 - decay) theta after every round."""

    decay: float = 0.9
    start: int = 1  # before this round, the average is the global model itself

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.decay < 1, f"decay must be in [0, 1), not {self.decay}.")
        _require_round("start", self.start)

    def follow(self, average: Vector, theta: Vector, round: int) -> Vector:
        return theta.clone() if round <= self.start else self.decay * average + (1 - self.decay) * theta


@dataclass(frozen=True, kw_only=True)
class Lookahead(Settings):
    """Slow weights that move a part of the way to the global model every few rounds (Zhang et al., 2019)."""

    every: int = 5  # k, rounds
    alpha: float = 0.5  # the part of the way
    reset: bool = False  # as in its paper: training continues from the slow weights

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.alpha <= 1, f"alpha must be in (0, 1], not {self.alpha}.")
        _require_round("every", self.every)

    def follow(self, average: Vector, theta: Vector, round: int) -> Vector:
        return average if round % self.every else average + self.alpha * (theta - average)


@dataclass(frozen=True, kw_only=True)
class Ensembles(Settings):
    """The averages of a run; none by default."""

    swa: SWA | None = None
    ema: EMA | None = None
    lookahead: Lookahead | None = None

    @property
    def averages(self) -> dict[str, Average]:
        return {f.name: average for f in fields(self) if (average := getattr(self, f.name)) is not None}

    @property
    def resets(self) -> bool:
        """True if an average changes training."""
        return self.lookahead is not None and self.lookahead.reset

    def only(self, names: Collection[str]) -> Self:
        return replace(self, **{f.name: None for f in fields(self) if f.name not in names})

    def start(self, theta: Vector) -> State:
        return {name: theta.clone() for name in self.averages}

    def follow(self, theta: Vector, server: State, round: int) -> tuple[Vector, State]:
        """The global model after a round, and the averages that include it."""
        if self.lookahead is not None and self.lookahead.reset and round % self.lookahead.every == 0:
            slow = self.lookahead.follow(server["lookahead"], theta, round)
            rest = replace(self, lookahead=None).follow(slow, server, round)[1]  # the others average these too
            return slow, {**rest, "lookahead": slow.clone()}
        return theta, {name: average.follow(server[name], theta, round) for name, average in self.averages.items()}


def _require_round(name: str, value: int) -> None:
    require(1 <= value <= 10**9, f"{name} must be at least 1 and at most 10^9, not {value}.")
