"""Which clients take part in a round."""

from __future__ import annotations

import numpy as np

from fedadc.data.dataset import Array


def uniform(clients: int, size: int, rng: np.random.Generator) -> Array:
    """A cohort of fixed size, uniform among all such cohorts (Algorithm 1, line 2)."""
    return np.sort(rng.choice(clients, size=size, replace=False, shuffle=False))


def hand_out_order(cohort: Array, steps: Array) -> Array:
    """Cohort order: most steps first, then by number. Uploads are added in this order whoever finishes first."""
    return cohort[np.lexsort((cohort, -steps))]
