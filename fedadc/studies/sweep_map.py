"""The heat map of a sweep: the best score for each pair of values of two keys, over all values of the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fedadc.analysis.heatmap import HeatMap
from fedadc.studies.space import Dimension, ValueList, brief
from fedadc.studies.trial_file import SweepTrial

BINS = 6  # of a range


def map_of_trials(
    space: Sequence[Dimension],
    trials: Sequence[SweepTrial],
    best: SweepTrial,
    important: Sequence[str],
    metric: str,
    maximize: bool,
    title: str | None,
) -> HeatMap | None:
    """The map of the two most important keys, or of the first two; None if no key is swept."""
    varied = {d.key: d for d in space if len(d.ends) > 1}
    if not varied:
        return None
    keys = [*(k for k in important if k in varied), *(k for k in varied if k not in important)][:2]
    x, *others = (_Axis(varied[key]) for key in keys)
    y = others[0] if others else None
    better = max if maximize else min
    cells: list[list[float | str | None]] = [[None] * len(x.ticks) for _ in (y.ticks if y else [""])]
    for trial in trials:
        row, column = y.bin(trial) if y else 0, x.bin(trial)
        old = cells[row][column]
        if trial.score is not None:
            cells[row][column] = better(old, trial.score) if isinstance(old, float) else trial.score
        elif not isinstance(old, float):
            cells[row][column] = trial.state if old in (None, "diverged") else old
    over = ", best over the other keys" if len(varied) > 2 else ""
    return HeatMap(
        x=x.dimension.key,
        y=y.dimension.key if y else "",
        x_ticks=x.ticks,
        y_ticks=y.ticks if y else [""],
        cells=cells,
        best=(y.bin(best) if y else 0, x.bin(best)),
        metric=metric,
        title=f"{title or 'sweep'}{over}; outlined: chosen",
    )


class _Axis:
    """The values of a key along an axis: numbers in their order, other values as listed, a range in bins."""

    def __init__(self, dimension: Dimension) -> None:
        self.dimension = dimension
        if isinstance(dimension, ValueList):
            values = dimension.values
            numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
            self.values = sorted(values) if numbers else list(values)
            self.ticks = [brief(value) for value in self.values]
        elif dimension.whole and dimension.high - dimension.low < BINS:
            self.values = list(range(int(dimension.low), int(dimension.high) + 1))
            self.ticks = [str(value) for value in self.values]
        else:
            self.values = []
            ends = [brief(float(f"{dimension.at(i / BINS):.2g}")) for i in range(BINS + 1)]
            self.ticks = [f"{low}–{high}" for low, high in pairwise(ends)]

    def bin(self, trial: SweepTrial) -> int:
        value = trial.settings[self.dimension.key]
        if self.values:
            return self.values.index(value)
        assert not isinstance(self.dimension, ValueList)
        return min(BINS - 1, int(BINS * self.dimension.position(value)))
