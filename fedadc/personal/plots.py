"""What clients gain by models of their own: a point per client, in the order of the gain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedadc.analysis.plots import COLORS, STYLES, plain, save_png
from fedadc.personal.results import ResultRow

DRAWN = 400  # points of a row, at most


def plot_gains(rows: Sequence[ResultRow], path: Path) -> None:
    """Personal less global accuracy, from the client that loses most to the one that gains most.

    Where no row has a global model, the personal accuracy itself.
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
        personal, of_global, samples = row.accuracies()
        if not len(personal) or (compared and of_global is None):
            continue
        gain = 100 * (personal - (of_global if of_global is not None else 0))
        color = COLORS[(index + 2) % len(COLORS)]
        order = np.argsort(gain, kind="stable")
        share = 100 * (np.arange(len(gain)) + 0.5) / len(gain)
        shown = np.unique(np.linspace(0, len(gain) - 1, min(DRAWN, len(gain))).astype(int))
        style = STYLES[index % len(STYLES)]  # rows often lie on each other
        axes.plot(share, gain[order], style, color=color, lw=1.5)
        axes.scatter(
            share[shown],
            gain[order][shown],
            s=4 + 36 * samples[order][shown] / samples.max(),
            color=color,
            alpha=0.6,
            lw=0,
            label=plain(f"{row.label}: mean {np.mean(gain):{'+' if compared else ''}.1f}"),
        )
    axes.set_xlabel(f"clients, by {'gain' if compared else 'accuracy'} (%)")
    axes.set_ylabel("personal less global accuracy (points)" if compared else "personal accuracy (%)")
    axes.set_title("a point per client; area: its test samples", loc="left", fontsize=10)
    axes.set_xlim(0, 100)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper left", fontsize=9)
    save_png(figure, path)
