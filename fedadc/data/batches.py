"""The training data of one client, its batches and their augmentation.

`Inputs.gather` is the only place where model inputs are created. It copies the samples, so that a batch is always
aligned, and it sets the memory format explicitly. The bits of a matrix product depend on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedadc.data.dataset import Array, Normalization, Samples
from fedadc.errors import FedadcError, require
from fedadc.fields.settings import Settings
from fedadc.fields.summary import field_summary
from fedadc.tasks import Task


@dataclass(frozen=True)
class Augment(Settings):
    """Random crop after zero padding, and random horizontal flip. Both are drawn independently for every sample."""

    crop: int = 0  # pixels of padding on each side; 0 disables cropping
    flip: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.crop >= 0, f"crop must be at least 0, not {self.crop}.")

    def __bool__(self) -> bool:
        return self.crop > 0 or self.flip

    def __call__(self, x: Tensor, rng: np.random.Generator) -> Tensor:
        n, channels, height, width = x.shape
        rows = np.tile(np.arange(height), (n, 1))  # the input row and column of every output pixel
        columns = np.tile(np.arange(width), (n, 1))
        if self.flip:
            columns = np.where(rng.integers(2, size=(n, 1)) == 1, columns[:, ::-1], columns)
        if self.crop:
            x = torch.nn.functional.pad(x, [self.crop] * 4)
            rows += rng.integers(2 * self.crop + 1, size=(n, 1))
            columns += rng.integers(2 * self.crop + 1, size=(n, 1))
        pixel = torch.from_numpy(rows[:, :, None] * x.shape[3] + columns[:, None, :]).to(x.device)
        taken = x.flatten(2).gather(2, pixel.reshape(n, 1, -1).expand(n, channels, -1))
        return taken.view(n, channels, height, width)


@dataclass(frozen=True)
class Inputs:
    """How raw samples are converted to model inputs."""

    normalization: Normalization
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    channels_last: bool = False  # store images [n, channels, height, width] pixel by pixel, not plane by plane
    whole: bool = False  # the model takes whole numbers, such as the indices of an embedding
    task: Task | None = None  # what the labels are; None: the labels are not used

    @property
    def kind(self) -> torch.dtype:
        """The type of the numbers that the model receives."""
        return torch.int64 if self.whole else self.dtype

    def gather(
        self, samples: Samples, indices: Array, augment: Augment | None = None, rng: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the samples at these indices, as new tensors."""
        chosen = torch.from_numpy(np.ascontiguousarray(indices))
        x, y = samples.x.index_select(0, chosen), samples.y.index_select(0, chosen)
        if augment and rng is not None:
            x = augment(x, rng)
        y = y.to(self.device) if self.task is None else self.task.for_training(y, self.device, self.dtype)
        if self.whole:
            return x.to(self.device, self.kind).contiguous(), y
        x = self._channels_last(x) if self.channels_last else x.to(self.device, self.dtype).contiguous()
        return self.normalization(x), y

    def _channels_last(self, x: Tensor) -> Tensor:
        """A copy with explicit strides; with one channel, torch could not tell the two memory formats apart."""
        _, channels, height, width = x.shape
        strides = (height * width * channels, 1, width * channels, channels)
        return torch.empty_strided(x.shape, strides, dtype=self.dtype, device=self.device).copy_(x)


@dataclass(frozen=True)
class Batch:
    """One mini-batch, as an objective receives it."""

    x: Tensor
    y: Tensor
    position: Array  # the samples' positions within the client's own data

    __repr__ = field_summary


@dataclass(frozen=True)
class ClientData:
    """The samples of one client, created when the client is selected."""

    samples: Samples
    indices: Array
    task: Task
    inputs: Inputs
    augment: Augment

    __repr__ = field_summary

    def __len__(self) -> int:
        return len(self.indices)

    def class_counts(self) -> Tensor:
        """The number of samples of each class, [classes]."""
        if not self.task.has_classes:
            raise FedadcError(f"class_counts needs classes, but the task is {self.task.name}.")
        labels = self.samples.y.index_select(0, torch.from_numpy(self.indices))
        return torch.bincount(labels, minlength=self.task.groups).to(self.inputs.device)

    def batches(self, positions: Iterable[Array], rng: Callable[[str], np.random.Generator]) -> Iterator[Batch]:
        """One batch for each array of positions; `rng("augment")` draws the augmentation."""
        drawn = rng("augment") if self.augment else None
        for position in positions:
            x, y = self.inputs.gather(self.samples, self.indices[position], self.augment, drawn)
            yield Batch(x, y, position)

    def in_order(self, positions: Array | None, size: int) -> Iterator[Batch]:
        """Batches of the samples at these positions (None: all samples), in the given order, without augmentation."""
        positions = np.arange(len(self)) if positions is None else positions
        for start in range(0, len(positions), size):
            part = positions[start : start + size]
            yield Batch(*self.inputs.gather(self.samples, self.indices[part]), part)


def shuffled(
    samples: int, batch_size: int, steps: int | None, epochs: int | None, rng: np.random.Generator
) -> Iterator[Array]:
    """The sample positions of each batch in one client's round.

    With `steps`: exactly that many full batches; the data is reshuffled whenever it is used up. With `epochs`: every
    sample once per epoch; the last batch of an epoch may be smaller. A client with fewer samples than `batch_size` uses
    all of them in every batch.
    """
    size = min(batch_size, samples)
    if steps is None:
        for _ in range(epochs or 1):
            order = rng.permutation(samples)
            yield from (order[start : start + size] for start in range(0, samples, size))
        return
    rest = rng.permutation(samples)
    for _ in range(steps):
        while len(rest) < size:
            rest = np.concatenate([rest, rng.permutation(samples)])
        yield rest[:size]
        rest = rest[size:]


def count_steps(samples: Array, batch_size: int, steps: int | None, epochs: int | None) -> Array:
    """The number of local steps H of each client, from its number of samples."""
    if steps is not None:
        return np.full(len(samples), steps, dtype=np.int64)
    return np.asarray((epochs or 1) * -(-samples // np.minimum(batch_size, samples)))


def count_samples(samples: Array, batch_size: int, epochs: int | None, done: Array) -> Array:
    """The number of samples each client uses in `done` steps; a sample that is used again is counted again."""
    size = np.minimum(batch_size, samples)
    if epochs is None:
        return np.asarray(done * size)
    full_epochs, extra_steps = np.divmod(done, -(-samples // size))
    return np.asarray(full_epochs * samples + np.minimum(extra_steps * size, samples))
