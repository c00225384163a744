"""Runs as curves, and the style in which every plot is drawn and saved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedadc.analysis.compare import AXES, curve, group, is_share, positions, unit_of
from fedadc.errors import FedadcError, one_line, require
from fedadc.runs.record import RecordedRun

STYLES = ("-", "--", ":", "-.")
COLORS = ("#6b7280", "#d97706", "#2563eb", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d")


def plot(
    runs: Sequence[RecordedRun],
    path: Path,
    metric: str = "test_accuracy",
    title: str | None = None,
    x: str = "round",
) -> None:
    """Convergence curves as PNG: mean over seeds, with the range of the seeds behind it.

    Seeds are averaged round by round, also where their rounds lie at different positions on the x axis.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = group(runs)
    many = len(groups) > len(COLORS)
    long = max(map(len, groups)) > 30 or (len(groups) > 6 and not many)
    below = 0.2 * math.ceil(len(groups) / 2) if long else 0.0  # room for the legend
    figure = Figure(figsize=(9.5 if many else 7.5, (5.5 if many else 4.5) + below), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    curves, unit = _curves(groups, metric, x)
    for index, drawn in enumerate(curves):
        color = COLORS[index % len(COLORS)]
        style = STYLES[index // len(COLORS) % len(STYLES)]
        twins = sum(drawn.looks_like(other) for other in curves[index + 1 :])  # drawn on top of this one
        axes.plot(drawn.x, drawn.mean, style, color=color, lw=1.8 + 2.4 * twins, label=plain(shorten(drawn.label, 60)))
        if not many:
            axes.fill_between(drawn.x, drawn.low, drawn.high, color=color, alpha=0.13, lw=0)
    axes.set_xlabel(AXES[x].label + (f" ({unit})" if unit else ""))
    axes.set_ylabel(metric.replace("_", " ") + (" (%)" if is_share(metric) else ""))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if long:
        figure.legend(frameon=False, loc="outside lower left", fontsize=8, ncols=2)
    elif many:
        figure.legend(frameon=False, loc="outside right center", fontsize=8)
    else:
        axes.legend(frameon=False, loc="best")
    if title:
        axes.set_title(plain(title), loc="left", fontsize=11)
    save_png(figure, path)


@dataclass(frozen=True)
class _Curve:
    """One setting: mean, lowest and highest value over its seeds."""

    label: str
    x: list[float]
    low: list[float]
    mean: list[float]
    high: list[float]

    def looks_like(self, other: _Curve) -> bool:
        """True if nobody could tell the two curves apart."""
        return _close(self.x, other.x) and _close(self.mean, other.mean)


def _curves(groups: Mapping[str, Sequence[RecordedRun]], metric: str, x: str) -> tuple[list[_Curve], str]:
    """A curve per group, and the unit of its x axis."""
    places = {label: [positions(member, x) for member in members] for label, members in groups.items()}
    unit, size = unit_of(x, [max(where.values()) for found in places.values() for where in found])
    scale = 100 if is_share(metric) else 1
    curves = []
    for label, members in groups.items():
        points: dict[int, list[float]] = {}
        for member in members:
            for t, value in curve(member, metric):
                points.setdefault(t, []).append(scale * value)
        rounds = sorted(t for t, values in points.items() if len(values) == len(members))
        along = [statistics.mean(where[t] for where in places[label]) / size for t in rounds]
        low, mean, high = ([f(points[t]) for t in rounds] for f in (min, statistics.mean, max))
        curves.append(_Curve(label, along, low, mean, high))
    return curves, unit


def _close(these: Sequence[float], those: Sequence[float]) -> bool:
    return len(these) == len(those) and all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(these, those, strict=True))


def plain(text: str) -> str:
    """As it stands: matplotlib takes what is between dollars for a formula."""
    return text.replace("$", r"\$")


def save_png(figure: Any, path: Path) -> None:
    require(path.suffix.lower() in ("", ".png"), f"--plot: {path.name} should end in .png; plots are PNG pictures.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except (OSError, ValueError) as error:
        raise FedadcError(f"the plot cannot be written to {path} ({one_line(error)}).") from error
