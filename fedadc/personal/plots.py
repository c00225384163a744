"""Plot of the accuracy that each client gains with its own model, sorted by gain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedadc.analysis.plots import COLORS, STYLES, escape_dollars, save_png
from fedadc.personal.results import ResultRow

MAX_POINTS = 400  # per row


def plot_gains(rows: Sequence[ResultRow], path: Path) -> None:
    """Save a plot of personal minus global accuracy, one point per client, as a PNG.

    If no row has a global model, it shows the personal accuracy itself.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    compared = any(row.accuracies()[1] is not None for row in rows)
    if compared:
        axes.axhline(0, color="#111827", lw=0.8)
    for index, row in enumerate(rows):
        personal, global_accuracy, samples = row.accuracies()
        if not len(personal) or (compared and global_accuracy is None):
            continue
        gain = 100 * (personal - (global_accuracy if global_accuracy is not None else 0))
        color = COLORS[(index + 2) % len(COLORS)]
        order = np.argsort(gain, kind="stable")
        share = 100 * (np.arange(len(gain)) + 0.5) / len(gain)
        shown = np.unique(np.linspace(0, len(gain) - 1, min(MAX_POINTS, len(gain))).astype(int))
        style = STYLES[index % len(STYLES)]  # rows often coincide
        axes.plot(share, gain[order], style, color=color, lw=1.5)
        axes.scatter(
            share[shown],
            gain[order][shown],
            s=4 + 36 * samples[order][shown] / samples.max(),
            color=color,
            alpha=0.6,
            lw=0,
            label=escape_dollars(f"{row.label}: mean {np.mean(gain):{'+' if compared else ''}.1f}"),
        )
    axes.set_xlabel(f"clients sorted by {'gain' if compared else 'accuracy'} (%)")
    axes.set_ylabel("personal − global accuracy (percentage points)" if compared else "personal accuracy (%)")
    axes.set_title("one point per client; area: its test samples", loc="left", fontsize=10)
    axes.set_xlim(0, 100)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper left", fontsize=9)
    save_png(figure, path)
