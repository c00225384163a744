"""The base class of all tasks: what the labels of a data set are, and how a model's outputs are judged by them.

A task is a frozen dataclass without samples. It says which shape the outputs have, counts sums over a batch of samples,
and computes metrics from these sums. Sums are float64 or whole numbers and are added in a fixed order, so no metric
depends on how many processes counted, or on which sites the samples are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray
Sums = Mapping[str, Array]  # sums over samples by name; those of several batches add up


@dataclass(frozen=True)
class Task(ABC):
    """What the labels of a data set are, and how outputs are judged by them."""

    name: ClassVar[str]  # the value of `task` in a config
    has_classes: ClassVar[bool] = False  # every sample has one class, so that samples per class can be counted
    score: ClassVar[str]  # the metric by which runs are judged; the higher, the better
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss",)  # the other way round
    always: ClassVar[tuple[str, ...]] = ("loss",)  # metrics that every evaluation has
    extra_metrics: ClassVar[tuple[str, ...]] = ()  # metrics that `evaluate.metrics` may add
    label_metrics: ClassVar[tuple[str, ...]] = ()  # those of them that tell the label of single samples
    sample_metric: ClassVar[str]  # a metric that is a mean over samples; clients are compared by it
    largest_value: ClassVar[float] = math.inf  # of a sample in this mean; the smallest is 0

    @property
    @abstractmethod
    def words(self) -> tuple[str, str]:
        """What the outputs of a model are, and how many there are: ("logits", "10 classes")."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[int, ...]:
        """The shape of a model's outputs for one sample."""

    @abstractmethod
    def label_problem(self, y: Tensor, split: str) -> str:
        """What is wrong with the labels of a split, in words that follow "data NAME: "; empty if nothing is."""

    @abstractmethod
    def blank_labels(self, samples: int) -> Tensor:
        """Labels for samples that have none, of the right shape and type."""

    def for_training(self, y: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Labels as an objective receives them; `dtype` is that of the model."""
        return y.to(device)

    @abstractmethod
    def strata(self, y: Tensor) -> Array:
        """The group of every sample, int64, from 0 on; shares are held out of every group alike."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """The number of different strata."""

    @abstractmethod
    def counted(self, outputs: Tensor, y: Tensor) -> Sums:
        """The sums over the samples of a batch, from outputs and labels as they are stored."""

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """The shape and the type of every sum, for a reader of sums from elsewhere."""

    @abstractmethod
    def possible(self, sums: Sums, samples: int) -> bool:
        """Whether sums of these shapes can be those of so many samples."""

    def without_labels(self, sums: Sums) -> Sums:
        """Sums with the same metrics that tell less of the labels, if no metric in `label_metrics` is asked for."""
        return sums

    @abstractmethod
    def metrics(self, sums: Sums, wanted: Sequence[str]) -> dict[str, Any]:
        """Metrics from the sums over all samples; `wanted` are extra ones."""

    @classmethod
    def gain(cls, value: Array, before: Array) -> Array:
        """By how much a value of `sample_metric` is better than another one; below 0: it is worse."""
        difference: Array = value - before
        return -difference if cls.sample_metric in cls.lower_is_better else difference

    @abstractmethod
    def sample_values(self, outputs: Tensor, y: Tensor) -> Array:
        """The value of every sample, float64, whose mean is `sample_metric`."""

    @abstractmethod
    def sample_total(self, sums: Sums) -> float:
        """The sum of these values over the samples of `sums`."""

    @abstractmethod
    def predicted(self, outputs: Tensor) -> Array:
        """What the outputs say about every sample, float64: probabilities, or numbers in units of the labels."""


def added(sums: Iterable[Sums]) -> Sums:
    """Sums of several batches, added in order."""
    total: dict[str, Array] = {}
    for some in sums:
        for name, value in some.items():
            total[name] = total[name] + value if name in total else value
    return total
