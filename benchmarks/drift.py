"""What `evaluate.drift` costs: `python benchmarks/drift.py` trains with and without it, in half a minute.

Both train in this process, round by round in turn; the figures are the median of the CPU time of a round and the median
of the ratios of neighboring rounds. Nothing is evaluated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from ours import dataset
from workloads import CLASSES

from fedadc import Federation, LocalWork
from fedadc.evaluation import Evaluation
from fedadc.methods import FedADC
from fedadc.models import CNN, MLP

IMAGE = (3, 32, 32)


def cases() -> dict[str, tuple[int, dict[str, Any]]]:
    """Rounds and settings by name: the digits experiment of docs/drift.md, and the paper's CNN at a quarter width."""
    torch.manual_seed(0)
    rows, images = torch.randn(50, 24, 64), torch.randn(100, 128, *IMAGE)
    labels = torch.randint(0, CLASSES, (100, 128))
    digits = {"model": MLP((64,), CLASSES, [64, 64]), "data": dataset(rows, labels[:50, :24]), "cohort": 10}
    cifar = {"model": CNN(IMAGE, CLASSES, width=0.25), "data": dataset(images, labels), "cohort": 4}
    return {
        "MLP as on digits, 8 steps of 16": (500, {**digits, "local": LocalWork(steps=8, batch_size=16)}),
        "CNN, width 0.25, 8 steps of 64": (13, {**cifar, "local": LocalWork(steps=8, batch_size=64, lr=0.01)}),
    }


def seconds(rounds: int, drift: bool, settings: dict[str, Any]) -> Iterator[float]:
    """CPU time of each round."""
    stream = Federation(method=FedADC(), test=0, evaluate=Evaluation(drift=drift), **settings).rounds(rounds)
    for _ in range(rounds):
        began = time.process_time()
        next(stream)
        yield time.process_time() - began


def main() -> None:
    for name, (rounds, settings) in cases().items():
        pairs = list(zip(*(seconds(rounds, drift, settings) for drift in (False, True)), strict=True))[1:]
        off, on = (1000 * median(times) for times in zip(*pairs, strict=True))
        ratio = median(with_drift / without for without, with_drift in pairs)
        print(f"{name}: {off:.1f} ms without, {on:.1f} ms with drift, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
