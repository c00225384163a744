"""Clients that fail: simulated drops and slow clients, updates that are not finite, and updates that are too large."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedadc.data.dataset import Array
from fedadc.errors import require
from fedadc.fields.settings import Settings
from fedadc.models.vectors import State
from fedadc.rng import generator


@dataclass(frozen=True, kw_only=True)
class Faults(Settings):
    """Simulated faults of every round, and what happens to updates that are not finite."""

    drop: float = 0.0  # share of the cohort that never reports
    slow: float = 0.0  # share of the cohort that does fewer steps; H is drawn before the first step
    bad_update: Literal["skip", "stop"] = "skip"  # on NaN or infinity: leave the client out, or end the run
    max_norm: float | None = None  # of every delta, as the server reads it; None: any
    too_large: Literal["clip", "skip"] = "clip"  # a delta beyond max_norm: scale it down, or leave the client out
    trace: str | None = None  # a file that a federation of real sites has written: repeat who joined and who was lost

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("drop", "slow"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} must be a share of the cohort in [0, 1], not {value}.")
        require(
            self.max_norm is None or 0 < self.max_norm < math.inf,
            f"max_norm must be positive and finite, not {self.max_norm}.",
        )
        require(
            self.drop + self.slow <= 1,
            f"drop and slow are shares of one cohort, so their sum is at most 1, not {self.drop + self.slow:g}.",
        )

    @property
    def usable(self) -> str:
        """What an update must be, or else it is left out."""
        return "finite" if self.max_norm is None or self.too_large == "clip" else "finite and within faults.max_norm"

    def draw(self, cohort: Array, steps: Array, seed: int, round: int) -> tuple[Array, Array, Array]:
        """Draw which clients of a cohort never report, which are slow, and the steps of each.

        A share that is no whole number of clients is rounded up or down at random, so that it is right on average. All
        depends on seed, round and cohort alone: every method meets the same faults.
        """
        none = np.zeros(len(cohort), dtype=bool)
        if not self.drop and not self.slow:
            return none, none, steps
        rng = generator(seed, "faults", round)
        order, carry, many = rng.permutation(len(cohort)), rng.random(), len(cohort)
        first = min(many, int(self.drop * many + carry))
        last = min(many, int((self.drop + self.slow) * many + carry))
        dropped, slow = none.copy(), none.copy()
        dropped[order[:first]], slow[order[first:last]] = True, True
        slow &= steps > 1  # every client does at least one step
        steps = steps.copy()
        for at in np.flatnonzero(slow).tolist():
            steps[at] = generator(seed, "slow", round, int(cohort[at])).integers(1, steps[at])
        return dropped, slow, steps


@dataclass(frozen=True)
class NormBound:
    """How large a delta may be, and what happens to a larger one."""

    limit: float
    clips: bool  # False: the client is left out

    @staticmethod
    def of(faults: Faults) -> NormBound | None:
        return None if faults.max_norm is None else NormBound(faults.max_norm, faults.too_large == "clip")

    def bounded(self, upload: State) -> State | None:
        """An upload whose delta is not too large; None: it is left out. Norms are computed in float64."""
        delta = upload.get("delta")
        others = [name for name in upload if name != "delta"]
        require(not others, f"faults.max_norm bounds delta alone, but uploads also have {', '.join(others)}.")
        if delta is None:
            return upload
        norm = float(torch.linalg.vector_norm(delta, dtype=torch.float64))
        if norm <= self.limit:
            return upload
        return {**upload, "delta": delta * (self.limit / norm)} if self.clips else None


def all_finite(vectors: State) -> bool:
    return all(_finite(vector) for vector in vectors.values())


def _finite(vector: torch.Tensor) -> bool:
    # The sum is faster: if it is finite, every entry is. If it is not, it may have overflowed, so check the entries.
    return bool(torch.isfinite(vector.sum())) or bool(torch.isfinite(vector).all())
