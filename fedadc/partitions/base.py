"""The base class of partitions, which assign every sample of a data set to exactly one client.

A partition is a frozen dataclass; `owners(labels, classes, clients, rng)` returns the client number of every sample as
an int64 vector. The built-in partitions are vectorized: a million clients take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import undefined
from fedadc.fields.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Partition(Settings):
    """The base class of all partitions; subclass it and write `owners`."""

    needs_classes: ClassVar[bool] = False  # True: it deals by class, so labels that are numbers are refused
    needs_clients: ClassVar[bool] = True  # False: the partition itself determines the number of clients

    def owners(self, labels: Array, classes: int, clients: int, rng: np.random.Generator) -> Array:
        """The client number of every sample; labels are classes, or numbers [n, targets] (then `classes` is 0)."""
        raise undefined(self, "owners(labels, classes, clients, rng)")
