"""Independent and identically distributed clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedadc.data.dataset import Array
from fedadc.partitions.base import Partition


@dataclass(frozen=True, kw_only=True)
class IID(Partition):
    """Random shares of equal size (they differ by at most one sample)."""

    def owners(self, labels: Array, classes: int, clients: int, rng: np.random.Generator) -> Array:
        return rng.permutation(np.arange(len(labels)) % clients)
