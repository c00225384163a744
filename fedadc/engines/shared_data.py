"""A data set and its clients in memory that worker processes see too: one copy, whatever the number of workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fedadc.data.dataset import Clients, Dataset, Samples
from fedadc.engines.shared_memory import SharedTensors


class SharedData:
    """All samples and client indices, in memory that a process which receives this object shares."""

    def __init__(self, data: Dataset, clients: Clients) -> None:
        splits = data.splits()
        tensors = {f"{name}.{part}": getattr(s, part) for name, s in splits.items() for part in ("x", "y")}
        tensors |= {"indices": torch.from_numpy(clients.indices), "offsets": torch.from_numpy(clients.offsets)}
        self._tensors, self._splits = SharedTensors(tensors), tuple(splits)

    def samples(self, split: str) -> Samples:
        views = self._tensors.views()
        return Samples(views[f"{split}.x"], views[f"{split}.y"])

    @property
    def clients(self) -> Clients:
        views = self._tensors.views()
        return Clients(views["indices"].numpy(), views["offsets"].numpy())

    def dataset(self, data: Dataset) -> Dataset:
        """The same data set with its samples in shared memory."""
        splits: dict[str, Any] = {name: self.samples(name) for name in self._splits}
        return replace(data, **splits)
