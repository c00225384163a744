"""What is known of the data sets to download before a file of theirs is read, and stand-ins for absent ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedadc.data.dataset import Dataset, Normalization, Samples
from fedadc.rng import generator

DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class Facts:
    """The kind and the number of the samples of a data set. Its inputs are bytes, its classes nearly equal in size."""

    input_shape: tuple[int, ...]
    train: int  # samples
    test: int
    classes: tuple[str, ...]
    normalization: Normalization


FACTS: dict[str, Facts] = {
    "mnist": Facts((1, 28, 28), 60_000, 10_000, DIGITS, Normalization(255.0, (0.1307,), (0.3081,))),
    "fashion_mnist": Facts(
        (1, 28, 28), 60_000, 10_000,
        ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
        Normalization(255.0, (0.2860,), (0.3530,)),
    ),
    "cifar10": Facts(
        (3, 32, 32), 50_000, 10_000,
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        Normalization(255.0, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ),
    "cifar100": Facts(
        (3, 32, 32), 50_000, 10_000, tuple(map(str, range(100))),
        Normalization(255.0, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ),
}  # fmt: skip


def stand_in(name: str) -> Dataset:
    """Random samples of the kind and number of a data set, for measuring what training on it costs."""
    facts = FACTS[name]

    def samples(split: str, count: int) -> Samples:
        pixels = generator(0, f"stand-in {split}").integers(256, size=(count, *facts.input_shape), dtype=np.uint8)
        return Samples(torch.from_numpy(pixels), torch.arange(count) % len(facts.classes))

    train, test = samples("train", facts.train), samples("test", facts.test)
    return Dataset(name, train, facts.classes, test=test, normalization=facts.normalization)
