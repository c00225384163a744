"""Label counts of a partition: how many samples of each class every client holds, as numbers and as a plot."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedadc.analysis.plots import save_png
from fedadc.config.build import load_data, words_of_the_config
from fedadc.config.settings import Config
from fedadc.data.dataset import Array
from fedadc.data.remarks import about_clients
from fedadc.partitions import Natural, deal
from fedadc.runs.record import TRAINING_ONLY, load_config
from fedadc.system.user_code import Notes

log = logging.getLogger("fedadc")
PLOTTED_CLIENTS = 200  # at most


@dataclass(frozen=True)
class LabelCounts:
    """The samples per client and class of a partitioned data set."""

    name: str  # of the data set
    rule: str  # name and settings of the partition
    classes: tuple[str, ...]  # none: the labels are numbers, and `counts` has one column
    clients: tuple[str, ...]  # names if the data has them, else numbers
    counts: Array  # [clients, classes]
    parts: dict[str, int]  # samples per split
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"LabelCounts({self.describe()})"

    def describe(self) -> str:
        sizes, labels = self.counts.sum(axis=1), (self.counts > 0).sum(axis=1)
        parts = ", ".join(f"{n:,} {part}" for part, n in self.parts.items())
        return (
            f"{self.name}: {parts}; {len(self.counts):,} clients, partition {self.rule}, {_range(sizes)} samples "
            + (f"and {_range(labels)} labels each" if self.classes else "each")
        )

    def sample(self, limit: int) -> Array:
        """The numbers of all clients, or of `limit` evenly spread ones if there are more."""
        return np.unique(np.linspace(0, len(self.counts) - 1, min(limit, len(self.counts))).astype(int))

    def as_dict(self) -> dict[str, Any]:
        return {
            "data": self.name,
            "partition": self.rule,
            "samples": self.parts,
            "classes": list(self.classes),
            "clients": list(self.clients),
            "counts": self.counts.tolist(),
            "notes": list(self.notes),
        }


def _range(values: Array) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"


def label_counts(
    source: Config | Mapping[str, Any] | str | Path,
    overrides: str | Sequence[str] = (),
    *,
    data_dir: str | Path | None = None,
    trust: bool = False,
    notes: Notes = log.info,
) -> LabelCounts:
    """The label counts of the partition that a run of this config uses; only what `data` names is loaded."""
    chosen = load_config(source, overrides, without=TRAINING_ONLY, trust=trust, notes=notes)
    config, data = load_data(chosen, data_dir)
    seed = config.seed if config.data.seed is None else config.data.seed
    with words_of_the_config(config):
        clients = deal(data, config.data.partition, config.data.clients, seed)
    tree = config.tree()["data"]["partition"]
    rule = " ".join([tree["name"], *(f"{k}={v}" for k, v in tree.items() if k != "name")])
    parts = {name: len(samples) for name, samples in data.splits().items()}
    named = isinstance(config.data.partition, Natural) and data.owners is not None
    names = tuple(map(str, np.unique(np.asarray(data.owners)) if named else range(len(clients))))
    counts = data.label_counts(clients)
    remarks = (*data.notes, *(about_clients(data) if named else ()))
    return LabelCounts(data.name, rule, data.classes, names, counts, parts, remarks)


def plot_label_counts(data: LabelCounts, path: Path) -> None:
    """Plot one dot per client and class; its area is proportional to the number of samples."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = data.sample(PLOTTED_CLIENTS)
    counts, classes = data.counts[shown], data.classes or ("samples",)
    figure = Figure(figsize=(min(14, 5 + 0.06 * len(shown)), min(12, 2 + 0.22 * len(classes))), dpi=150,
                    layout="constrained")  # fmt: skip
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    column, row = np.nonzero(counts)
    axes.scatter(column, row, s=60 * counts[column, row] / max(1, counts.max()), color="#2563eb", alpha=0.8, lw=0)
    axes.set_xlim(-1, len(shown))
    axes.set_ylim(len(classes) - 0.5, -0.5)
    ticks = np.arange(0, len(shown), max(1, round(len(shown) / 10)))
    names = [data.clients[shown[t]] for t in ticks]
    axes.set_xticks(ticks, names, rotation=30 if max(map(len, names)) > 4 else 0)
    few = len(classes) <= 30
    axes.set_yticks(range(len(classes)) if few else [], classes if few else [])
    axes.set_xlabel("client" if len(shown) == len(data.counts) else f"client ({len(shown)} of {len(data.counts):,})")
    axes.set_ylabel("class" if data.classes else "")
    axes.set_title(f"{data.name}, {data.rule}; dot area: samples (at most {counts.max():,})", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    save_png(figure, path)
