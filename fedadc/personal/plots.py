"""Plot of what each client gains with its own model, sorted by gain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedadc.analysis.plots import COLORS, STYLES, escape_dollars, save_png
from fedadc.personal.results import ResultRow

MAX_POINTS = 400  # per row


def plot_gains(rows: Sequence[ResultRow], path: Path) -> None:
    """Save a plot of how much better the personal model is than the global one, a point per client, as a PNG.

    If no row has a global model, it shows how good the personal model is.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    compared = any(row.values()[1] is not None for row in rows)
    is_share, metric = rows[0].is_share, rows[0].metric
    scale, in_percent, points = (100, " (%)", " (percentage points)") if is_share else (1, "", "")
    difference = f"personal − global {metric}" if is_share else f"global − personal {metric}"
    if compared:
        axes.axhline(0, color="#111827", lw=0.8)
    for index, row in enumerate(rows):
        personal, shared, samples = row.values()
        if not len(personal) or (compared and shared is None):
            continue
        gain = scale * (personal if shared is None else row.task.gain(personal, shared))
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
            label=escape_dollars(
                f"{row.label}: mean {np.mean(gain):{'+' if compared else ''}{'.1f' if is_share else '.4g'}}"
            ),
        )
    axes.set_xlabel(f"clients sorted by {'gain' if compared else metric} (%)")
    axes.set_ylabel(difference + points if compared else f"personal {metric}{in_percent}")
    axes.set_title("one point per client; area: its test samples", loc="left", fontsize=10)
    axes.set_xlim(0, 100)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper left", fontsize=9)
    save_png(figure, path)
