"""User code for tests, which leaves a trace when it is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

TRACE = "import pathlib\nwith (pathlib.Path(__file__).parent / 'trace').open('a') as f:\n    f.write(__name__ + ' ')\n"
MINE = f"""{TRACE}
from dataclasses import dataclass
import numpy as np
import torch
import fedadc
import my_helper


@dataclass(frozen=True, kw_only=True)
class Slow(fedadc.methods.FedAvg):
    gain: float = my_helper.GAIN


@dataclass(frozen=True, kw_only=True)
class Other(fedadc.methods.FedAvg):
    gain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Everybody(fedadc.selections.Selection):
    def chooser(self, clients, size, label_counts, rng):
        return lambda rng: np.arange(size)


class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = torch.nn.Linear(64, classes)

    def embed(self, x):
        return x.flatten(1)

    def forward(self, x):
        return self.head(self.embed(x))


def dots(count: int = 60):
    x = np.arange(count * 64, dtype=np.float32).reshape(count, 1, 8, 8) / 1000
    return fedadc.from_arrays(x, np.arange(count) % 3)
"""
TINY: dict[str, Any] = {
    "rounds": 1,
    "data": {"name": "digits", "clients": 5},
    "model": {"name": "mlp", "hidden": [4]},
    "local": {"steps": 1, "batch_size": 8, "lr": 0.1},
    "cohort": {"size": 2},
    "checkpoint": {"every": 1},
}


def own_folder(folder: Path, changes: dict[str, Any] | None = None, **files: str) -> Path:
    """A config with the method mine:Slow beside mine.py and my_helper.py; the path of the config."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"mine": MINE, "my_helper": f"{TRACE}GAIN = 2.0\n", **files}.items():
        (folder / f"{name}.py").write_text(text)
    tree = {**TINY, "method": "mine:Slow", **(changes or {})}
    (folder / "c.yaml").write_text(yaml.safe_dump(tree))
    return folder / "c.yaml"


def trace(folder: Path) -> list[str]:
    """The modules of a folder that were executed since the last look."""
    file = folder / "trace"
    found = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return found
