"""Data sets, held in memory as whole tensors, and the assignment of their samples to clients.

The clients of a federation are two index arrays. The samples of one client are gathered only when it is selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedadc.data.encoding import TableEncoding
from fedadc.errors import DataError, require
from fedadc.fields.settings import Settings
from fedadc.fields.summary import field_summary
from fedadc.tasks import Classification, Regression, Target, Task

Array = np.ndarray  # of any dtype; comments state dtype and shape where they matter
CLIENTS_PER_BLOCK = 10_000  # clients whose labels are counted at once; bounds the temporary memory


@dataclass(frozen=True)
class Samples:
    """One split: inputs `x` [n, ...] (uint8 for images) and labels `y`: classes [n], int64, or numbers [n, targets]."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        require(len(self.x) == len(self.y), f"{len(self.x)} inputs do not match {len(self.y)} labels.", DataError)

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Samples({len(self):,} of shape {_shape(self.x.shape[1:])})"

    def labels(self, indices: Array) -> Tensor:
        """The labels of the samples at these indices."""
        return self.y.index_select(0, torch.from_numpy(np.ascontiguousarray(indices)))

    def take(self, indices: Array) -> Samples:
        chosen = torch.from_numpy(np.ascontiguousarray(indices))
        return Samples(self.x[chosen], self.y[chosen])


@dataclass(frozen=True)
class Clients:
    """Client k holds the samples `indices[offsets[k] : offsets[k + 1]]` of its split."""

    indices: Array  # int32 or int64 [n]
    offsets: Array  # int64 [clients + 1]

    @staticmethod
    def from_owner(owner: Array, clients: int) -> Clients:
        """Clients from the owner of every sample. Each sample has exactly one owner."""
        offsets = np.zeros(clients + 1, dtype=np.int64)
        np.cumsum(np.bincount(owner, minlength=clients), out=offsets[1:])
        index_type = np.int32 if len(owner) < 2**31 else np.int64  # int32 takes half the memory
        return Clients(np.argsort(owner, kind="stable").astype(index_type, copy=False), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Clients({len(self):,} with {len(self.indices):,} samples)"

    def __getitem__(self, client: int) -> Array:
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> Array:
        """The number of samples of every client."""
        return np.diff(self.offsets)

    def in_order(self, numbers: Sequence[int]) -> Clients:
        """These clients only, in this order."""
        indices = np.concatenate([self[number] for number in numbers])
        return Clients(indices, np.concatenate([[0], np.cumsum(self.sizes[list(numbers)])]))

    def class_counts(self, y: Tensor, classes: int) -> Array:
        """The number of samples per client and class, [clients, classes]."""
        counts = np.empty((len(self), classes), dtype=np.int32 if len(self.indices) < 2**31 else np.int64)
        labels, sizes = y.numpy(), self.sizes
        for start in range(0, len(self), CLIENTS_PER_BLOCK):
            stop = min(start + CLIENTS_PER_BLOCK, len(self))
            owner = np.repeat(np.arange(stop - start), sizes[start:stop])
            cells = owner * classes + labels[self.indices[self.offsets[start] : self.offsets[stop]]]
            counts[start:stop] = np.bincount(cells, minlength=(stop - start) * classes).reshape(-1, classes)
        return counts


@dataclass(frozen=True)
class Normalization(Settings):
    """Input normalization: (x / scale - mean) / std, per channel.

    The constants come from a loader or a config. They are never computed from the clients' pooled data.
    """

    scale: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    __repr__ = field_summary

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize a floating-point batch in place."""
        if not self.mean:
            return x.div_(self.scale) if self.scale != 1 else x
        mean, std = _scaled(self, x.dtype, x.device, x.ndim)
        return x.sub_(mean).div_(std)


@cache
def _scaled(constants: Normalization, dtype: torch.dtype, device: torch.device, ndim: int) -> tuple[Tensor, Tensor]:
    """Mean and std in units of the raw inputs."""
    shape = (-1, *[1] * (ndim - 2))
    mean, std = (torch.tensor(values, dtype=dtype, device=device) for values in (constants.mean, constants.std))
    return mean.view(shape) * constants.scale, std.view(shape) * constants.scale


@dataclass(frozen=True)
class DataSpec:
    """What the server and all clients agree on about the data, without any sample."""

    input_shape: tuple[int, ...]
    dtype: torch.dtype  # of the stored inputs
    classes: tuple[str, ...]
    normalization: Normalization
    targets: tuple[Target, ...] = ()

    @property
    def task(self) -> Task:
        """What the labels are."""
        return Regression(self.targets) if self.targets else Classification(len(self.classes))


@dataclass(frozen=True)
class Dataset:
    """The splits of a data set, its class names, its normalization and the owners of its samples."""

    name: str
    train: Samples
    classes: tuple[str, ...]  # none if the labels are numbers
    test: Samples | None = None
    validation: Samples | None = None
    normalization: Normalization = Normalization()
    owners: Array | None = None  # the client id of every training sample (numbers or strings), in a natural federation
    notes: tuple[str, ...] = ()  # remarks of the loader for the user
    test_owners: Array | None = None  # the client id of every test sample, if known
    validation_owners: Array | None = None  # the client id of every validation sample, if known
    encoding: TableEncoding | None = None  # of a table: how its rows became samples
    targets: tuple[Target, ...] = ()  # the numbers to predict; none if the labels are classes

    def __post_init__(self) -> None:
        require(len(self.train) > 0, f"data {self.name} has no training sample.", DataError)
        shape = list(self.input_shape)
        require(0 not in shape, f"data {self.name}: samples of shape {shape} are empty.", DataError)
        require(len(self.classes) > 1 or bool(self.targets), f"data {self.name} has fewer than two classes.", DataError)
        require(not self.classes or not self.targets, f"data {self.name} has classes and targets; give one of them.")
        self._check_owners()
        for split, samples in self.splits().items():
            problem = self.task.label_problem(samples.y, split)
            require(not problem, f"data {self.name}: {problem}.", DataError)
            require(
                samples.x.shape[1:] == self.train.x.shape[1:],
                f"data {self.name}: {split} samples have shape {list(samples.x.shape[1:])}, "
                f"but training samples have shape {list(self.train.x.shape[1:])}.",
                DataError,
            )

    def _check_owners(self) -> None:
        owners = {"train": self.owners, "test": self.test_owners, "validation": self.validation_owners}
        for split, ids in owners.items():
            samples = len(self.splits().get(split, ()))
            name = "owners" if split == "train" else f"{split}_owners"
            require(
                ids is None or len(ids) == samples,
                f"data {self.name}: {name} must hold one client id per {split} sample, not "
                f"{0 if ids is None else len(ids)} for {samples} samples.",
                DataError,
            )

    def __repr__(self) -> str:
        parts = [f"{len(samples):,} {split}" for split, samples in self.splits().items()]
        if self.owners is not None:
            parts.append("natural clients")
        labels = f"{len(self.targets):,} targets" if self.targets else f"{len(self.classes):,} classes"
        return f"Dataset({', '.join([self.name, *parts, f'shape {_shape(self.input_shape)}', labels])})"

    def label_counts(self, clients: Clients) -> Array:
        """The training samples per client and class, [clients, classes]; labels that are numbers are of one class."""
        return clients.class_counts(torch.from_numpy(self.task.strata(self.train.y)), self.task.groups)

    def splits(self) -> dict[str, Samples]:
        """The existing splits by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: samples for name, samples in named.items() if samples is not None}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])

    @property
    def spec(self) -> DataSpec:
        return DataSpec(self.input_shape, self.train.x.dtype, self.classes, self.normalization, self.targets)

    @property
    def task(self) -> Task:
        """What the labels are."""
        return self.spec.task


def _shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))
