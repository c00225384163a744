"""A natural federation: the data itself names its clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedadc.partitions.base import Partition


@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """The clients that the data itself names (a client column, client ids, a list of client arrays)."""

    needs_clients: ClassVar[bool] = False
