"""What a checkpoint costs: `python benchmarks/checkpoints.py` writes several for each kind of run and prints a table.

The share is of a run's time at the default interval: one checkpoint every 30 s, or 50 times its own cost where that is
longer, which is what keeps it below 2 %.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from ours import dataset
from rich.console import Console
from rich.progress import track
from rich.table import Table
from workloads import CLASSES, LR, mlp

import fedadc
from fedadc.config.settings import Checkpointing
from fedadc.models import CNN, ResNet18
from fedadc.runs.checkpoint import LARGEST_SHARE

REPEATS = 5
SECONDS = Checkpointing().seconds


def federation(
    model: torch.nn.Module, shape: tuple[int, ...], method: fedadc.methods.Method, clients: int
) -> fedadc.Federation:
    """Clients with two samples each, all of whom take part in every round."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(clients, 2, *shape, generator=rng)
    data = dataset(x, torch.randint(0, CLASSES, (clients, 2), generator=rng))
    return fedadc.Federation(
        test=0, model=model, data=data, method=method, local=fedadc.LocalWork(steps=1, batch_size=1, lr=LR)
    )


def runs() -> dict[str, fedadc.Federation]:
    torch.manual_seed(0)
    image = (3, 32, 32)
    small = mlp(784, 100, CLASSES)
    return {
        "FedADC, MLP": federation(small, (784,), fedadc.methods.FedADC(), 10),
        "FedADC, the paper's CNN": federation(CNN(image, CLASSES), image, fedadc.methods.FedADC(), 2),
        "FedADC, ResNet-18": federation(ResNet18(image, CLASSES), image, fedadc.methods.FedADC(), 2),
        "SCAFFOLD, MLP, 100 clients": federation(small, (784,), fedadc.methods.Scaffold(), 100),
        "SCAFFOLD, MLP, 1,000 clients": federation(small, (784,), fedadc.methods.Scaffold(), 1000),
    }


def measured(trained: fedadc.Federation) -> tuple[float, float]:
    """Seconds of a checkpoint after a round that changed every client, and the megabytes that were new in it."""
    seconds = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as room:
        checkpoints = fedadc.runs.Checkpoints(Path(room) / "checkpoints", trained)
        for result in trained.rounds(REPEATS + 1):
            began = time.perf_counter()
            checkpoints.write(result.state)
            seconds.append(time.perf_counter() - began)
            now = f"{result.round}.safetensors"
            new = sum(p.stat().st_size for p in Path(room).rglob("*") if p.is_file() and p.name.endswith(now))
    return median(seconds[1:]), new / 1e6  # the first also makes the checksum of the data


def main() -> None:
    table = Table("run", "written, MB", "seconds", "interval, s", "share of the run, %")
    for name, trained in track(runs().items(), "checkpoints"):
        seconds, megabytes = measured(trained)
        interval = max(SECONDS, seconds / LARGEST_SHARE)
        share = 100 * seconds / (seconds + interval)
        table.add_row(name, f"{megabytes:.1f}", f"{seconds:.3f}", f"{interval:.0f}", f"{share:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
