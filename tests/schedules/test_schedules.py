"""Learning rates by hand, and what every schedule does after its horizon."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedadc.schedules import SCHEDULES, Constant, Cosine, Exponential, Step


def test_schedules_by_hand() -> None:
    def rates(schedule: Any, rounds: int = 5) -> list[float]:
        return [round(schedule(t, 4), 6) for t in range(1, rounds + 1)]

    assert rates(Constant()) == [1, 1, 1, 1, 1]
    assert rates(Step(every=2, gamma=0.5)) == [1, 1, 0.5, 0.5, 0.25]
    assert rates(Exponential(gamma=0.5)) == [1, 0.5, 0.25, 0.125, 0.0625]
    half = math.sqrt(0.5)
    assert rates(Cosine(final=0.5)) == [1, round(0.75 + half / 4, 6), 0.75, round(0.75 - half / 4, 6), 0.5]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_stay_where_they_are_after_the_horizon(name: str) -> None:
    schedule = SCHEDULES[name](horizon=7)
    assert schedule(8, 100) == schedule(50, 100) == schedule(8, 9) > 0
