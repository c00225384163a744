"""Centralized training: one client has all samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedadc.data.dataset import Array
from fedadc.partitions.base import Partition


@dataclass(frozen=True, kw_only=True)
class Pooled(Partition):
    """One client with all samples: centralized training, the upper bound."""

    needs_clients: ClassVar[bool] = False

    def owners(self, labels: Array, classes: int, clients: int, rng: np.random.Generator) -> Array:
        return np.zeros(len(labels), dtype=np.int64)
