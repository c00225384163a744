"""Which clients take part in a round: from the seed and what the server knows before training, nothing else.

A selection is a frozen dataclass; `chooser` works out once what all rounds share and returns a function that draws a
cohort. It sees neither models nor results, so the cohort of any round can be known ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import undefined

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
