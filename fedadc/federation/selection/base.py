"""Which clients take part in a round: from the seed and what the server knows before training, nothing else.

A selection is a frozen dataclass; `chooser` works out once what all rounds share and returns a function that draws a
cohort. It sees neither models nor results, so the cohort of any round can be known ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import require, undefined

Chooser = Callable[[np.random.Generator], Array]  # a generator of the round -> the numbers of its clients


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Base of all selections; subclass it and write `chooser`."""

    def chooser(self, clients: int, size: int, label_counts: Callable[[], Array], rng: np.random.Generator) -> Chooser:
        """How cohorts of `size` of so many clients are drawn.

        The function can be pickled, as all of a federation. `label_counts()` is how many samples of each class each
        client holds, [clients, classes]; `rng` is for what is drawn once for all rounds.
        """
        raise undefined(self, "chooser(clients, size, label_counts, rng)")


@dataclass(frozen=True, kw_only=True)
class Uniform(Selection):
    """A cohort of fixed size, uniform among all such cohorts (Algorithm 1, line 2)."""

    def chooser(self, clients: int, size: int, label_counts: Callable[[], Array], rng: np.random.Generator) -> Chooser:
        return partial(_uniform, clients, size)


def _uniform(clients: int, size: int, rng: np.random.Generator) -> Array:
    return rng.choice(clients, size=size, replace=False, shuffle=False)


def cohort_of(chosen: Array, clients: int, size: int, source: str) -> Array:
    """What a chooser returned, sorted, if it is a cohort."""
    cohort = np.unique(chosen)
    right = cohort.shape == (size,) and cohort.dtype.kind in "iu" and cohort[0] >= 0 and cohort[-1] < clients
    require(
        right, f"{source} must choose {size} different clients of 0..{clients - 1}, not {np.asarray(chosen)!s:.60}."
    )
    return cohort.astype(np.int64, copy=False)


def hand_out_order(cohort: Array, steps: Array) -> Array:
    """Cohort order: most steps first, then by number. Uploads are added in this order whoever finishes first."""
    return cohort[np.lexsort((cohort, -steps))]
