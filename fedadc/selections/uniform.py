"""Uniform client selection (Algorithm 1, line 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedadc.data.dataset import Array
from fedadc.selections.base import Chooser, Selection


@dataclass(frozen=True, kw_only=True)
class Uniform(Selection):
    """A cohort of fixed size, uniform among all such cohorts (Algorithm 1, line 2)."""

    def chooser(self, clients: int, size: int, label_counts: Callable[[], Array], rng: np.random.Generator) -> Chooser:
        return partial(_uniform, clients, size)


def _uniform(clients: int, size: int, rng: np.random.Generator) -> Array:
    return rng.choice(clients, size=size, replace=False, shuffle=False)
