"""The base class of all client selections.

A selection is a frozen dataclass. Its `chooser` does the work that all rounds share once, and returns a function that
draws the cohort of a round. A selection uses only the seed and what the server knows before training. It sees neither
models nor results, so the cohort of any round can be computed in advance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import undefined
from fedadc.fields.settings import Settings

Chooser = Callable[[np.random.Generator], Array]  # the round's random generator -> the indices of its clients


@dataclass(frozen=True, kw_only=True)
class Selection(Settings):
    """Base class of all selections. Subclasses implement `chooser`."""

    needs_label_counts: ClassVar[bool] = False  # a real site is asked for its own only if this is true

    def chooser(self, clients: int, size: int, label_counts: Callable[[], Array], rng: np.random.Generator) -> Chooser:
        """A function that draws cohorts of `size` out of `clients` clients. It must be picklable.

        `label_counts()` returns the number of samples per client and class, [clients, classes]. `rng` is for random
        choices that are made once for all rounds.
        """
        raise undefined(self, "chooser(clients, size, label_counts, rng)")
