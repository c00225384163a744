"""Bootstrap intervals of figures: rows, or whole clients, are drawn again and again with replacement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import require
from fedadc.rng import generator

Figures = Mapping[str, float | None]
BOOTSTRAP_DRAWS = 1000


def percentile_intervals(
    figures: Callable[[Array], Figures],
    rows: int,
    seed: int,
    clients: Sequence[Array] | None = None,
    draws: int = BOOTSTRAP_DRAWS,
    confidence: float = 0.95,
) -> dict[str, tuple[float, float]]:
    """The percentile bootstrap intervals of `figures(row numbers)`; with `clients`, their rows, clients are drawn.

    An interval covers what other held-out rows would have changed: how far the figure of this very model may be from
    the one over all rows of this kind, if rows are independent of each other. Where clients are drawn, rows of one
    client may depend on each other, and the interval covers further clients like these. It does not cover training:
    another seed gives another model, and `fedadc compare` shows how far these differ. Percentile intervals are too
    narrow with few rows or clients (below about 30), and lie within what was seen: an accuracy of 100 % has the
    interval 100 to 100 %. A figure that is not defined in some draws, e.g. AUROC where only one class was drawn, has
    the interval of the others. Draws depend on `seed` and the number of rows or clients alone.
    """
    require(0 < confidence < 1, f"confidence must be between 0 and 1, not {confidence}.")
    units = rows if clients is None else len(clients)
    rng = generator(seed, f"bootstrap of {'rows' if clients is None else 'clients'}")
    values: dict[str, list[float]] = {}
    for _ in range(draws if units else 0):
        drawn = rng.integers(units, size=units)
        chosen = drawn if clients is None else np.concatenate([clients[k] for k in drawn])
        for name, value in figures(chosen).items():
            if value is not None and np.isfinite(value):
                values.setdefault(name, []).append(value)
    ends = (1 - confidence) / 2, (1 + confidence) / 2
    return {name: (float(low), float(high)) for name, (low, high) in
            ((name, np.quantile(found, ends)) for name, found in values.items())}  # fmt: skip
