"""How samples are dealt to clients. Each rule gives every sample one owner: clients are disjoint and complete.

A rule is a frozen dataclass; `owners(labels, classes, clients, rng)` returns an int64 vector of client numbers.
Everything is vectorized: a million clients take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import undefined


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Base of all partitions; subclass it and write `owners`."""

    needs_clients: ClassVar[bool] = True  # False: the rule itself says how many clients there are

    def owners(self, labels: Array, classes: int, clients: int, rng: np.random.Generator) -> Array:
        raise undefined(self, "owners(labels, classes, clients, rng)")
