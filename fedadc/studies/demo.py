"""The demo, which takes a minute: FedAvg, SlowMo, FedADC and FedADC+ on digits with two labels per client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fedadc.analysis.compare import summarize
from fedadc.analysis.comparison import Comparison
from fedadc.analysis.plots import PLOT
from fedadc.config.settings import Config
from fedadc.runs.directory import require_empty
from fedadc.runs.record import load_config, read_run
from fedadc.runs.runner import run

BASE: dict[str, Any] = {
    "rounds": 60,
    "data": {"name": "digits", "clients": 50, "partition": {"name": "sort", "labels_per_client": 2}},
    "model": {"name": "mlp", "hidden": [64, 64]},
    "local": {"steps": 8, "batch_size": 16, "lr": 0.1},
    "cohort": {"size": 10},
}
DEMO_METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # folder -> (label, method)
    "fedavg": ("FedAvg", {"name": "fedavg"}),
    "slowmo": ("SlowMo", {"name": "slowmo", "beta": 0.9}),
    "fedadc-heavy-ball": ("FedADC heavy-ball", {"name": "fedadc", "beta": 0.9}),
    "fedadc-nesterov": ("FedADC Nesterov", {"name": "fedadc", "beta": 0.9, "nesterov": True}),
    "fedadc+": ("FedADC+", {"name": "fedadc+", "beta": 0.9, "nesterov": True}),
}
TARGET = 0.9
TITLE = "digits, 50 clients with 2 labels each, 10 per round"


def configs(seeds: int) -> Iterator[tuple[str, Config]]:
    """The name of the run directory and the config of every run of the demo."""
    for seed in range(seeds):
        for folder, (label, method) in DEMO_METHODS.items():
            yield f"{folder}-seed{seed}", load_config({**BASE, "seed": seed, "label": label, "method": method})


def demo(
    out: str | Path = "runs/demo",
    *,
    seeds: int = 3,
    overwrite: bool = False,
    watch: Callable[[str, dict[str, Any]], None] | None = None,
) -> Comparison:
    """Train all runs of the demo, compare them, and save their curves in `out`.

    `watch` is called with the name of a run and the record of every round.
    """
    planned, folder = list(configs(seeds)), Path(out)
    for name, _ in planned:
        require_empty(folder / name, overwrite)
    for name, config in planned:
        run(config, out=folder / name, overwrite=overwrite, watch=None if watch is None else partial(watch, name))
    runs = [read_run(folder / name) for name, _ in planned]
    result = Comparison(summarize(runs, TARGET), runs, "test_accuracy", title=TITLE)
    result.plot(folder / PLOT)
    return result
