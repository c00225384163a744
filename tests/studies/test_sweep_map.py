"""The heat map of a sweep: which cell has which value, and a picture that can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedadc.analysis.heatmap import draw_heat_map
from fedadc.studies.space import read_space
from fedadc.studies.sweep_map import BINS, map_of_trials
from fedadc.studies.trial_file import SweepTrial


def trial(number: int, score: float | None, state: Any = "finished", **settings: Any) -> SweepTrial:
    return SweepTrial(trial=number, settings=settings, score=score, state=state)


def test_a_cell_has_the_best_over_the_other_keys() -> None:
    space = read_space({"c": [1, 2], "a": [10, 5], "b": ["x", [8]], "d": [7]})
    trials = [
        trial(0, 0.3, c=1, a=10, b="x", d=7),
        trial(1, 0.4, c=2, a=10, b="x", d=7),
        trial(2, None, "diverged", c=1, a=10, b="x", d=7),
        trial(3, None, "diverged", c=1, a=5, b="x", d=7),
        trial(4, None, "pruned", c=2, a=5, b="x", d=7),
    ]
    drawn = map_of_trials(space, trials, trials[1], ["a", "b", "c"], "validation_accuracy", True, "mine")
    assert drawn is not None and (drawn.x, drawn.y) == ("a", "b")
    assert drawn.x_ticks == ["5", "10"] and drawn.y_ticks == ["x", "[8]"]  # numbers in order, others as listed
    assert drawn.cells == [["pruned", 0.4], [None, None]] and drawn.best == (0, 1)
    assert drawn.title == "mine, best over the other keys; outlined: chosen"
    low = map_of_trials(space, trials, trials[0], ["a", "b", "c"], "validation_loss", False, None)
    assert low is not None and low.cells[0][1] == 0.3
    first = map_of_trials(space, trials, trials[1], [], "validation_accuracy", True, None)
    assert first is not None and (first.x, first.y) == ("c", "a")  # without importances, in their order


def test_a_range_has_bins_in_its_own_scale() -> None:
    space = read_space({"lr": "0.001..1000,log", "steps": "1..4,int"})
    trials = [trial(n, n / 10, lr=10.0 ** (n - 3) * 1.5, steps=1 + n % 4) for n in range(6)]
    trials += [trial(6, 0.9, lr=1000.0, steps=4)]  # the end of the range
    drawn = map_of_trials(space, trials, trials[6], [], "validation_accuracy", True, None)
    assert drawn is not None and drawn.y_ticks == ["1", "2", "3", "4"]
    assert drawn.x_ticks[:2] == ["0.001–0.01", "0.01–0.1"] and len(drawn.x_ticks) == BINS
    assert [drawn.cells[n % 4][n] for n in range(5)] == [n / 10 for n in range(5)]
    assert drawn.best == (3, BINS - 1) and drawn.cells[3][BINS - 1] == 0.9


@pytest.mark.parametrize("values", [2, 40])
@pytest.mark.parametrize("metric", ["validation_accuracy", "validation_loss"])
def test_one_key_is_one_row_and_every_map_can_be_drawn(tmp_path: Path, values: int, metric: str) -> None:
    space = read_space({"a$b": [f"${n}" for n in range(values)]})
    trials = [trial(n, n / 50, **{"a$b": f"${n}"}) for n in range(values)]
    drawn = map_of_trials(space, trials, trials[-1], [], metric, True, "$x")
    assert drawn is not None and drawn.y == "" and len(drawn.cells) == 1 and drawn.best == (0, values - 1)
    draw_heat_map(drawn, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_no_swept_key_is_no_map() -> None:
    only = trial(0, 0.5, a=1)
    assert map_of_trials(read_space({"a": [1]}), [only], only, [], "validation_accuracy", True, None) is None
