"""The clients of every round, as a selection draws them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import require
from fedadc.rng import generator
from fedadc.selections.base import Selection

NEAR = 2  # rounds before and after the present one whose cohorts are kept


class Cohorts:
    """Call it with a round to get its cohort. It depends on seed and round alone, so any round is known ahead."""

    def __init__(
        self, selection: Selection, clients: int, size: int, label_counts: Callable[[], Array], seed: int
    ) -> None:
        self.selection, self.clients, self.size, self.seed = selection, clients, size, seed
        self._choose = selection.chooser(clients, size, label_counts, generator(seed, "selection"))
        self._known: dict[int, Array] = {}  # by round

    def __call__(self, round: int) -> Array:
        if round not in self._known:
            chosen = self._choose(generator(self.seed, "cohort", round))
            cohort = cohort_of(chosen, self.clients, self.size, type(self.selection).__name__)
            self._known = {t: c for t, c in self._known.items() if abs(t - round) <= NEAR} | {round: cohort}
        return self._known[round].copy()


def cohort_of(chosen: Array, clients: int, size: int, source: str) -> Array:
    """What a chooser returned, sorted, if it is a cohort."""
    cohort = np.unique(chosen)
    right = cohort.shape == (size,) and cohort.dtype.kind in "iu" and cohort[0] >= 0 and cohort[-1] < clients
    require(
        right, f"{source} must choose {size} different clients of 0..{clients - 1}, not {np.asarray(chosen)!s:.60}."
    )
    return cohort.astype(np.int64, copy=False)
