"""Partitions of a data set among clients: one file per partition, and their table by config name."""

from fedadc.partitions.base import Partition
from fedadc.partitions.deal import deal, default_partition, partition
from fedadc.partitions.dirichlet import Dirichlet
from fedadc.partitions.iid import IID
from fedadc.partitions.natural import Natural
from fedadc.partitions.pooled import Pooled
from fedadc.partitions.sort import SortAndPartition

PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "sort": SortAndPartition,
    "dirichlet": Dirichlet,
    "natural": Natural,
    "pooled": Pooled,
}

__all__ = [
    "IID",
    "PARTITIONS",
    "Dirichlet",
    "Natural",
    "Partition",
    "Pooled",
    "SortAndPartition",
    "deal",
    "default_partition",
    "partition",
]
