"""The cohort of every round, drawn by a selection and cached."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedadc.data.dataset import Array
from fedadc.data.roster import Roster
from fedadc.errors import FedadcError
from fedadc.rng import generator
from fedadc.selections.base import Selection

CACHED_ROUNDS = 2  # cohorts stay cached for this many rounds before and after the last one requested


class Cohorts:
    """Call it with a round number to get its cohort, which depends only on the seed and the round number."""

    def __init__(self, selection: Selection, roster: Roster, size: int, seed: int) -> None:
        self.selection, self.clients, self.size, self.seed = selection, len(roster), size, seed
        self._choose = selection.chooser(len(roster), size, roster.label_counts, generator(seed, "selection"))
        self._cache: dict[int, Array] = {}  # by round

    def __call__(self, round: int) -> Array:
        if round not in self._cache:
            chosen = self._choose(generator(self.seed, "cohort", round))
            cohort = cohort_of(chosen, self.clients, self.size, type(self.selection).__name__)
            nearby = {t: c for t, c in self._cache.items() if abs(t - round) <= CACHED_ROUNDS}
            self._cache = nearby | {round: cohort}
        return self._cache[round].copy()


class ChangingCohorts:
    """The cohort of every round where clients join, leave and return: it is drawn from those that are present."""

    def __init__(
        self,
        selection: Selection,
        roster_at: Callable[[int], Roster],
        present: Callable[[int], Array],
        size_of: Callable[[int], int],  # the number of clients that are present -> the size of the cohort
        seed: int,
    ) -> None:
        self.selection, self.roster_at, self.present, self.size_of, self.seed = (
            selection, roster_at, present, size_of, seed,
        )  # fmt: skip

    def __call__(self, round: int) -> Array:
        here, roster, seed = self.present(round), self.roster_at(round), self.seed
        size = self.size_of(len(here))
        choose = self.selection.chooser(
            len(here), size, lambda: roster.label_counts()[here], generator(seed, "selection")
        )
        chosen = choose(generator(seed, "cohort", round))
        cohort: Array = here[cohort_of(chosen, len(here), size, type(self.selection).__name__)]
        return cohort


def cohort_of(chosen: Array, clients: int, size: int, source: str) -> Array:
    """The sorted cohort that a chooser returned; an error if it is not a valid cohort."""
    cohort = np.unique(chosen)
    valid = cohort.shape == (size,) and cohort.dtype.kind in "iu" and cohort[0] >= 0 and cohort[-1] < clients
    if not valid:
        raise FedadcError(
            f"{source} must choose {size} different clients from 0..{clients - 1}, not {np.asarray(chosen)!s:.60}."
        )
    return cohort.astype(np.int64, copy=False)
