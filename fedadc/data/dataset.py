"""A data set is whole tensors in memory; its clients are two arrays, a client a slice made when it is selected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedadc.errors import require

Array = np.ndarray  # of any type; the checks below say which
COUNTED = 10_000  # clients whose labels are counted at once: a million have small temporaries too


@dataclass(frozen=True)
class Samples:
    """One split: inputs `x` [n, ...] (uint8 where they are images) and labels `y` [n] (int64)."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        require(len(self.x) == len(self.y), f"{len(self.x)} inputs do not match {len(self.y)} labels.")

    def __len__(self) -> int:
        return len(self.y)

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
        """From the owner of every sample: each sample has one, so clients are disjoint and complete."""
        offsets = np.zeros(clients + 1, dtype=np.int64)
        np.cumsum(np.bincount(owner, minlength=clients), out=offsets[1:])
        small = len(owner) < 2**31  # then half the memory will do
        return Clients(np.argsort(owner, kind="stable").astype(np.int32 if small else np.int64, copy=False), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Array:
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> Array:
        return np.diff(self.offsets)

    def sizes_of(self, clients: Array) -> Array:
        """The same of some clients; it costs what they are, not what there are."""
        return np.asarray(self.offsets[clients + 1] - self.offsets[clients])

    def class_counts(self, y: Tensor, classes: int) -> Array:
        """How many samples of each class each client holds, [clients, classes]."""
        counts = np.empty((len(self), classes), dtype=np.int32 if len(self.indices) < 2**31 else np.int64)
        labels, sizes = y.numpy(), self.sizes
        for begun in range(0, len(self), COUNTED):
            part = slice(begun, min(begun + COUNTED, len(self)))
            owner = np.repeat(np.arange(part.stop - begun), sizes[part])
            cells = owner * classes + labels[self.indices[self.offsets[begun] : self.offsets[part.stop]]]
            counts[part] = np.bincount(cells, minlength=(part.stop - begun) * classes).reshape(-1, classes)
        return counts


@dataclass(frozen=True)
class Normalization:
    """(x / scale - mean) / std, per channel. The constants belong to a loader or a config, never to pooled data."""

    scale: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize a floating-point batch in place."""
        if not self.mean:
            return x.div_(self.scale) if self.scale != 1 else x
        mean, std = _scaled(self, x.dtype, x.device, x.ndim)
        return x.sub_(mean).div_(std)


@cache
def _scaled(constants: Normalization, dtype: torch.dtype, device: torch.device, ndim: int) -> tuple[Tensor, Tensor]:
    """Mean and std in the units of the raw inputs, made once."""
    shape = (-1, *[1] * (ndim - 2))
    mean, std = (torch.tensor(values, dtype=dtype, device=device) for values in (constants.mean, constants.std))
    return mean.view(shape) * constants.scale, std.view(shape) * constants.scale


@dataclass(frozen=True)
class Dataset:
    """Whole tensors of every split, and what is known about them."""

    name: str
    train: Samples
    classes: tuple[str, ...]
    test: Samples | None = None
    validation: Samples | None = None
    normalization: Normalization = Normalization()
    owners: Array | None = None  # natural federation: the client id of every training sample, any type
    notes: tuple[str, ...] = ()  # what a loader did that a user should know
    test_owners: Array | None = None  # the client id of every test sample, where it is known
    validation_owners: Array | None = None  # likewise

    def __post_init__(self) -> None:
        require(len(self.train) > 0, f"data {self.name} has no training sample.")
        require(0 not in self.input_shape, f"data {self.name}: samples of shape {list(self.input_shape)} are empty.")
        require(len(self.classes) > 1, f"data {self.name} has fewer than two classes.")
        require(
            self.test_owners is None or (self.test is not None and len(self.test_owners) == len(self.test)),
            f"data {self.name}: the client ids of test samples do not match them.",
        )
        for split, samples in self.splits().items():
            bad = torch.nonzero((samples.y < 0) | (samples.y >= len(self.classes)))
            require(
                len(bad) == 0,
                f"data {self.name}: label {int(samples.y[bad[0, 0]]) if len(bad) else 0} of {split} sample "
                f"{int(bad[0, 0]) if len(bad) else 0} is outside 0..{len(self.classes) - 1}.",
            )
            require(
                samples.x.shape[1:] == self.train.x.shape[1:],
                f"data {self.name}: {split} samples have shape {list(samples.x.shape[1:])}, "
                f"training samples {list(self.train.x.shape[1:])}.",
            )

    def splits(self) -> dict[str, Samples]:
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: samples for name, samples in named.items() if samples is not None}

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])
