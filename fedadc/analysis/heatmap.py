"""A heat map with numbers: one figure for every pair of settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from fedadc.analysis.compare import is_share
from fedadc.analysis.plots import escape_dollars, save_png

HEATMAP = "heatmap.png"  # in the folder of a sweep
OUTLINE = "#d97706"
MOST_NUMBERS = 24  # columns with numbers in their cells; more would overlap


@dataclass(frozen=True)
class HeatMap:
    """What is drawn; `cells` has a row for each y, from the bottom up."""

    x: str
    y: str  # "": one row without a name
    x_ticks: Sequence[str]
    y_ticks: Sequence[str]
    cells: Sequence[Sequence[float | str | None]]  # a value, or a word where there is none, or nothing
    best: tuple[int, int]  # row and column that are outlined
    metric: str
    title: str


def draw_heat_map(map: HeatMap, path: Path) -> None:
    """Save a heat map as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    scale = 100 if is_share(map.metric) else 1
    values = np.array([[scale * v if isinstance(v, float) else np.nan for v in row] for row in map.cells])
    rows, columns = values.shape
    size = (min(16.0, 3.2 + 0.95 * columns), min(12.0, 1.6 + 0.5 * rows + 0.1 * _longest(map.x_ticks)))
    figure = Figure(figsize=(max(6.5, size[0]), max(2.2, size[1])), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="Blues")
    label = map.metric.replace("_", " ") + (" (%)" if is_share(map.metric) else "")
    figure.colorbar(image, ax=axes, label=label)
    middle = (np.nanmin(values) + np.nanmax(values)) / 2 if np.isfinite(values).any() else 0.0
    for row in range(rows) if columns <= MOST_NUMBERS else ():
        for column in range(columns):
            cell, value = map.cells[row][column], values[row, column]
            text = f"{value:.1f}" if is_share(map.metric) else f"{value:.3g}"
            shown, dark = (text, value > middle) if isinstance(cell, float) else (cell or "", False)
            color = "white" if dark else "#9ca3af" if isinstance(cell, str) else "#111827"
            axes.text(column, row, shown, ha="center", va="center", fontsize=8, color=color)
    row, column = map.best
    outline: dict[str, Any] = {"fill": False, "ec": OUTLINE, "lw": 2.5, "zorder": 5}  # above the lines between cells
    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, clip_on=False, **outline))
    slanted = _longest(map.x_ticks) > 8
    turned: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    axes.set_xticks(range(columns), [_tick(t) for t in map.x_ticks], **turned)
    axes.set_yticks(range(rows), [_tick(t) for t in map.y_ticks])
    axes.set_xlabel(escape_dollars(map.x))
    axes.set_ylabel(escape_dollars(map.y))
    axes.set_title(escape_dollars(map.title), loc="left", fontsize=10)
    axes.set_facecolor("#f3f4f6")  # where nothing was tried
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", lw=1.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", length=0)
    save_png(figure, path)


def _longest(texts: Sequence[str]) -> int:
    return max((len(_tick(text)) for text in texts), default=0)


def _tick(text: str) -> str:
    return escape_dollars(shorten(text, 24, placeholder="…") or text[:24])
