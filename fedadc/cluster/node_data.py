"""The data of a simulation on the nodes of a cluster: one copy per node, which all its workers read.

It is sent once to every node, or read there from the node's own disk; then its checksum must be that of the data here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from fedadc.cluster.arrays import Arrays, to_arrays, view
from fedadc.data.dataset import Clients, Dataset, Samples
from fedadc.errors import one_line


class NodeData:
    """A data set and its clients in the object store of a node."""

    def __init__(self, samples: Arrays, clients: tuple[np.ndarray, np.ndarray]) -> None:
        self._samples, self.clients = samples, Clients(*clients)

    def samples(self, split: str) -> Samples:
        return Samples(view(self._samples[f"{split}.x"]), view(self._samples[f"{split}.y"]))


def sample_arrays(data: Dataset) -> Arrays:
    """All samples of a data set by split."""
    return to_arrays({f"{name}.{part}": getattr(s, part) for name, s in data.splits().items() for part in ("x", "y")})


def checksum_of(samples: Arrays) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(samples.items()):
        plain, dtype = (array, "") if isinstance(array, np.ndarray) else array
        digest.update(f"{name} {plain.dtype} {plain.shape} {dtype};".encode())
        digest.update(np.ascontiguousarray(plain).data)
    return digest.hexdigest()


def read_on_node(load: Callable[[], Dataset], expected: str) -> tuple[str, Arrays]:
    """Load the data on a node. The first part says why it cannot be used there; "" if it is as expected."""
    try:
        samples = sample_arrays(load())
    except Exception as error:  # no such folder, a damaged file
        return one_line(error)[:300], {}
    return ("", samples) if checksum_of(samples) == expected else ("its data has another checksum", {})
