"""The workloads, their models and their data: the same for every system that is measured.

The data is synthetic, from a fixed seed, and lies in a cache folder (FEDADC_BENCH_CACHE; about 0.8 GB). One process
writes it before anything is measured (`python benchmarks/workloads.py`, which run.py calls); all others only read.
This file runs in the peers' environments too, so it needs torch and NumPy only.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LR = 0.05  # of SGD without momentum, everywhere
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    name: str
    clients: int
    samples: int  # of each client
    shape: tuple[int, ...]
    cohort: int
    epochs: int
    batch: int
    warm: int  # rounds before the timed ones
    timed: int
    file: str
    limit: int  # seconds until a system is given up

    @property
    def steps(self) -> int:
        """Of one client in one round."""
        return self.epochs * self.samples // self.batch

    @property
    def rounds(self) -> int:
        return self.warm + self.timed

    @property
    def title(self) -> str:
        shape = "x".join(map(str, self.shape))
        return (
            f"{self.name}: {self.clients:,} clients x {self.samples} samples of {shape}, cohort {self.cohort}, "
            f"{self.steps} steps of batch {self.batch}"
        )


_ALL = (
    Workload("W1", 100, 500, (3, 32, 32), 10, 1, 50, 1, 2, "img", 400),
    Workload("W2", 1000, 60, (784,), 100, 1, 20, 2, 10, "vec", 200),
    Workload("W2b", 1000, 60, (784,), 20, 10, 10, 1, 5, "vec", 200),
)
WORKLOADS = tuple(w.name for w in _ALL)


def quick() -> bool:
    """Whether this is only a trial of the scripts (run.py --quick)."""
    return bool(os.environ.get("FEDADC_BENCH_QUICK"))


def workload(name: str) -> Workload:
    """A workload by its name; a tenth of its cohort in a trial."""
    found = next(w for w in _ALL if w.name == name)
    return replace(found, cohort=max(2, found.cohort // 10), warm=1, timed=2) if quick() else found


class CNN(nn.Module):
    """Four convolutions, three poolings, four fully connected layers; 807,178 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise((3, 32, 64, 128, 128))])
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise((128 * 16, 256, 128, 64, CLASSES))])

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.convs[0](x))
        for conv in self.convs[1:]:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


def mlp(*widths: int) -> nn.Sequential:
    """Fully connected layers of these widths, inputs and classes included."""
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CNN() if name == "W1" else mlp(784, 200, 200, CLASSES)


def cache_folder() -> Path:
    """Where data, logs and the peers' environments lie."""
    given = os.environ.get("FEDADC_BENCH_CACHE")
    if given:
        return Path(given).expanduser().resolve()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (home if home.is_dir() else Path(tempfile.gettempdir())) / "fedadc-bench"


def _files(file: str) -> tuple[Path, Path]:
    folder = cache_folder() / "data"
    return folder / f"{file}_x.npy", folder / f"{file}_y.npy"


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """x [clients, samples, ...] and y [clients, samples], memory-mapped."""
    paths = _files(workload(name).file)
    if not all(path.exists() for path in paths):
        raise SystemExit("there is no data yet: run `python benchmarks/workloads.py` first.")
    x, y = (np.load(path, mmap_mode="r") for path in paths)
    return x, y


def load_tensors(name: str) -> tuple[Tensor, Tensor]:
    """The same in this process's own memory."""
    x, y = (torch.from_numpy(np.array(part)) for part in load(name))
    return x, y


@cache
def kept(name: str) -> tuple[np.ndarray, np.ndarray, nn.Module]:
    """Data and a model, once in a process: for Flower's actors, which run a function per client."""
    return (*load(name), make_model(name))


def make_data() -> None:
    """Write what is missing. A file appears under its name only when it is whole."""
    for w in {w.file: w for w in _ALL}.values():
        paths = _files(w.file)
        if all(path.exists() for path in paths):
            continue
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        x = rng.standard_normal((w.clients, w.samples, *w.shape), dtype=np.float32)
        y = rng.integers(0, CLASSES, (w.clients, w.samples), dtype=np.int64)
        for path, array in zip(paths, (x, y), strict=True):
            half = path.with_suffix(f".{os.getpid()}.npy")
            np.save(half, array)
            half.replace(path)


if __name__ == "__main__":
    make_data()
