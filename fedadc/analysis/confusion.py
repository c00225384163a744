"""A confusion matrix as a picture: rows are labels, columns are predictions, colors are shares of a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from fedadc.analysis.plots import escape_dollars, save_png
from fedadc.data.dataset import Array
from fedadc.errors import require

MOST_COUNTED = 24  # classes with counts in their cells; more would overlap
MOST_NAMED = 60  # classes with names at their rows and columns


def plot_confusion(confusion: Array, classes: Sequence[str], path: Path, title: str = "") -> None:
    """Save a confusion matrix as a PNG; cells have the number of rows where there are at most 24 classes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    many = len(classes)
    require(confusion.shape == (many, many), f"{many} classes do not match a matrix of shape {confusion.shape}.")
    totals = confusion.sum(axis=1, keepdims=True)
    shares = 100 * confusion / np.maximum(totals, 1)
    names = [escape_dollars(shorten(name, 24, placeholder="…") or name[:24]) for name in classes]
    longest = max(map(len, names))
    side = min(12.0, max(3.2, 0.42 * many)) if many <= MOST_COUNTED else 8.0
    figure = Figure(figsize=(side + 1.6 + 0.08 * longest, side + 0.8 + 0.06 * longest), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    figure.colorbar(image, ax=axes, label="share of the label's rows (%)", shrink=0.8)
    for row, column in zip(*np.nonzero(confusion), strict=True) if many <= MOST_COUNTED else ():
        color = "white" if shares[row, column] > 55 else "#111827"
        size = 11 if many <= 4 else 8 if many <= 12 else 6
        axes.text(column, row, f"{confusion[row, column]:,}", ha="center", va="center", fontsize=size, color=color)
    ticks = range(many) if many <= MOST_NAMED else []
    slanted: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if longest * many > 24 else {}
    small = 9 if many <= MOST_COUNTED else 6
    axes.set_xticks(ticks, names if len(ticks) else [], fontsize=small, **slanted)
    axes.set_yticks(ticks, names if len(ticks) else [], fontsize=small)
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")
    axes.set_title(escape_dollars(title), loc="left", fontsize=10)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    save_png(figure, path)
