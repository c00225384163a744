"""Convergence curves of runs, and the style that all plots share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedadc.analysis.compare import AXES, curve, group, is_share, positions, unit_of, with_metric
from fedadc.errors import DiskError, FedadcError, one_line, require
from fedadc.runs.record import RecordedRun

PLOT = "convergence.png"  # in the folder of several runs
STYLES = ("-", "--", ":", "-.")
COLORS = ("#6b7280", "#d97706", "#2563eb", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d")
LOOKS = [(color, style) for style in STYLES for color in COLORS]


def plot(
    runs: Sequence[RecordedRun],
    path: Path,
    metric: str = "test_accuracy",
    title: str | None = None,
    x: str = "round",
) -> None:
    """Save convergence curves as a PNG: the mean over seeds, with the range of the seeds shaded.

    Seeds are averaged round by round, even if the same round has different x values for different seeds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = group(with_metric(runs, metric))
    crowded = len(groups) > len(COLORS)
    legend_below = max(map(len, groups)) > 30 or (len(groups) > 6 and not crowded)
    room = 0.2 * math.ceil(len(groups) / 2) if legend_below else 0.0
    figure = Figure(figsize=(9.5 if crowded else 7.5, (5.5 if crowded else 4.5) + room), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles = {
        label: (COLORS[i % len(COLORS)], STYLES[i // len(COLORS) % len(STYLES)]) for i, label in enumerate(groups)
    }
    _draw(axes, groups, metric, x, styles, shaded=not crowded)
    if legend_below:
        figure.legend(frameon=False, loc="outside lower left", fontsize=8, ncols=2)
    elif crowded:
        figure.legend(frameon=False, loc="outside right center", fontsize=8)
    else:
        axes.legend(frameon=False, loc="best")
    if title:
        axes.set_title(escape_dollars(title), loc="left", fontsize=11)
    save_png(figure, path)


def plot_panels(
    panels: Mapping[str, Sequence[RecordedRun]], path: Path, metrics: Sequence[str], x: str, title: str
) -> None:
    """Save convergence curves of several panels side by side. A label has one look in all; metrics differ in style."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    grouped = {name: group(runs) for name, runs in panels.items()}
    labels = list(dict.fromkeys(label for groups in grouped.values() for label in groups))
    columns = min(len(panels), 3)
    lines, legend = math.ceil(len(panels) / columns), math.ceil(len(labels) * len(metrics) / (2 * columns))
    size = (4.2 * columns + 1.6, 3.4 * lines + 0.25 * legend + 0.5)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(escape_dollars(title), x=0.01, ha="left", fontsize=11)
    for number, (name, groups) in enumerate(grouped.items(), start=1):
        axes = figure.add_subplot(lines, columns, number)
        for index, metric in enumerate(metrics):
            looks = LOOKS if len(metrics) == 1 else [(color, STYLES[index]) for color in COLORS]
            styles = {label: looks[labels.index(label) % len(looks)] for label in groups}
            suffix = f", {metric.removesuffix('_test_accuracy')}" if index else ""
            _draw(axes, groups, metric, x, styles, len(metrics) == 1 and len(labels) <= 4, suffix)
        axes.set_ylabel("test accuracy (%)")
        axes.set_title(escape_dollars(name), loc="left", fontsize=9)
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, frameon=False, loc="outside lower left", fontsize=8, ncols=2 * columns)
    save_png(figure, path)


def _draw(
    axes: Any,
    groups: Mapping[str, Sequence[RecordedRun]],
    metric: str,
    x: str,
    styles: Mapping[str, tuple[str, str]],
    shaded: bool,
    suffix: str = "",
) -> None:
    """Draw a curve for every group."""
    curves, unit = _curves(groups, metric, x)
    for index, drawn in enumerate(curves):
        color, style = styles[drawn.label]
        hiding = sum(drawn.looks_like(other) for other in curves[index + 1 :])  # later curves on top of this one
        width, label = 1.8 + 2.4 * hiding, escape_dollars(shorten(drawn.label, 60)) + suffix
        axes.plot(drawn.x, drawn.mean, style, color=color, lw=width, label=label)
        if shaded:
            axes.fill_between(drawn.x, drawn.low, drawn.high, color=color, alpha=0.13, lw=0)
    axes.set_xlabel(AXES[x].label + (f" ({unit})" if unit else ""))
    axes.set_ylabel(metric.replace("_", " ") + (" (%)" if is_share(metric) else ""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


@dataclass(frozen=True)
class _Curve:
    """One setting: mean, lowest and highest value over its seeds."""

    label: str
    x: list[float]
    low: list[float]
    mean: list[float]
    high: list[float]

    def looks_like(self, other: _Curve) -> bool:
        """True if the two curves coincide in the plot."""
        return _close(self.x, other.x) and _close(self.mean, other.mean)


def _curves(groups: Mapping[str, Sequence[RecordedRun]], metric: str, x: str) -> tuple[list[_Curve], str]:
    """A curve per group, and the unit of the x axis."""
    progress = {label: [positions(member, x) for member in members] for label, members in groups.items()}
    unit, size = unit_of(x, [max(at.values()) for seeds in progress.values() for at in seeds])
    scale = 100 if is_share(metric) else 1
    curves = []
    for label, members in groups.items():
        points: dict[int, list[float]] = {}
        for member in members:
            for t, value in curve(member, metric):
                points.setdefault(t, []).append(scale * value)
        rounds = sorted(t for t, values in points.items() if len(values) == len(members))
        mean_x = [statistics.mean(at[t] for at in progress[label]) / size for t in rounds]
        low, mean, high = ([f(points[t]) for t in rounds] for f in (min, statistics.mean, max))
        curves.append(_Curve(label, mean_x, low, mean, high))
    return curves, unit


def _close(first: Sequence[float], second: Sequence[float]) -> bool:
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(math.isclose(a, b, rel_tol=1e-3) for a, b in pairs)


def escape_dollars(text: str) -> str:
    """The text for matplotlib, which reads what is between dollar signs as a formula."""
    return text.replace("$", r"\$")


def save_png(figure: Any, path: Path) -> None:
    require(path.suffix.lower() in ("", ".png"), f"{path.name} should end in .png; plots are PNG files.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except (OSError, ValueError) as error:
        kind = DiskError if isinstance(error, OSError) else FedadcError
        raise kind(f"the plot cannot be written to {path} ({one_line(error)}).") from error
