"""Intervals and verdicts: closed forms, symmetries, and the coverage that the docstring states."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedadc.analysis import statistics
from fedadc.analysis.statistics import (
    Interval,
    Verdict,
    all_of,
    bootstrap_interval,
    student_quantile,
    verdict,
)
from fedadc.errors import FedadcError
from fedadc.rng import generator

HOLDS, FAILS, UNKNOWN = Verdict.HOLDS, Verdict.DOES_NOT_HOLD, Verdict.CANNOT_BE_TOLD
whole = st.integers(-1000, 1000)


@pytest.mark.parametrize(
    ("probability", "degrees", "table"),
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.776), (0.975, 9, 2.262), (0.95, 5, 2.015), (0.995, 30, 2.750)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(probability: float, degrees: int, table: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(table, abs=5e-4)
    assert student_quantile(1 - probability, degrees) == pytest.approx(-table, abs=5e-4)


def test_quantiles_of_students_t_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for probability, degrees in product((0.02, 0.4, 0.5, 0.8, 0.975, 0.999), (1, 2, 3, 4, 7, 10, 51, 200)):
        expected = float(stats.t.ppf(probability, degrees))
        assert student_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_closed_forms() -> None:
    assert bootstrap_interval([0.25]) == Interval(0.25, -math.inf, math.inf, 1)
    assert bootstrap_interval([0.1, 0.1, 0.1]) == Interval(0.1, 0.1, 0.1, 3)
    # t(0.975, 2) = 4.3, so the percentile is 7e-8, less than the 1/27 of the smallest resample: the whole range
    assert bootstrap_interval([3.0, 1.0, 2.0]) == Interval(2.0, 1.0, 3.0, 3)
    # 5 values: the percentile is .00095, above the 1/3125 of "five times the smallest", below the next's 6/3125
    assert bootstrap_interval([0.0, 10.0, 20.0, 30.0, 40.0]) == Interval(20.0, 2.0, 38.0, 5)


def test_resamples_are_enumerated_with_their_probabilities() -> None:
    values = [0.0, 1.0, 5.0]
    expected: dict[float, float] = {}
    for chosen in product(values, repeat=3):
        expected[sum(chosen) / 3] = expected.get(sum(chosen) / 3, 0) + 1 / 27
    found = dict(statistics._all_resamples(values))
    assert found.keys() == expected.keys() and all(found[m] == pytest.approx(expected[m]) for m in expected)


@pytest.mark.parametrize("confidence", [0.6, 0.8, 0.95])
def test_enumeration_and_random_resamples_agree(confidence: float, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.9, 0.1, 0.7, 0.35, 0.2]
    enumerated = bootstrap_interval(values, confidence)
    monkeypatch.setattr(statistics, "ENUMERATED", 0)
    drawn = bootstrap_interval(values, confidence)
    assert (drawn.low, drawn.high) == pytest.approx((enumerated.low, enumerated.high), abs=0.035)
    assert drawn != enumerated  # or nothing was drawn


@pytest.mark.parametrize(("n", "share"), [(2, 0.50), (3, 0.75), (4, 0.87), (5, 0.93), (10, 0.95)])
def test_the_stated_coverage_is_the_real_one(n: int, share: float) -> None:
    times = 400 if n > statistics.ENUMERATED else 2000
    drawn = generator(0, f"coverage {n}").normal(loc=7, size=(times, n))
    covered = [found.low <= 7 <= found.high for found in map(bootstrap_interval, drawn.tolist())]
    assert np.mean(covered) == pytest.approx(share, abs=0.03)
    assert f"{share:.0%}".replace("%", " %") in (bootstrap_interval.__doc__ or "")


@given(st.lists(whole, min_size=2, max_size=5), whole, st.integers(1, 50), st.randoms(use_true_random=False))
def test_intervals_move_with_their_values(values: list[int], shift: int, scale: int, random: object) -> None:
    found = bootstrap_interval(values)
    moved = bootstrap_interval([shift + scale * v for v in values])
    for name in ("mean", "low", "high"):
        assert getattr(moved, name) == pytest.approx(shift + scale * getattr(found, name), abs=1e-9)
    mirrored = bootstrap_interval([-v for v in values])
    assert (mirrored.low, mirrored.high) == (-found.high, -found.low)
    random.shuffle(values)  # type: ignore[attr-defined]
    assert bootstrap_interval(values) == found
    assert min(values) <= found.low <= found.mean <= found.high <= max(values)


def test_many_values_in_any_order_give_the_same_interval() -> None:
    values = [0.3, 0.9, 0.1, 0.5, 0.2, 0.8, 0.4]
    found = bootstrap_interval(values)
    assert bootstrap_interval(values[::-1]) == bootstrap_interval(sorted(values)) == found
    assert bootstrap_interval(values, 0.5).high < found.high


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.1, 0.3, HOLDS), (-0.3, -0.1, FAILS), (-0.1, 0.3, UNKNOWN), (0.0, 0.3, UNKNOWN), (-0.3, 0.0, FAILS),
        (0.0, 0.0, FAILS), (2.0, 3.0, FAILS), (0.5, 1.5, UNKNOWN), (-1.0, 2.0, UNKNOWN),
    ],
)  # fmt: skip
def test_a_verdict_needs_the_whole_interval_on_one_side(low: float, high: float, expected: Verdict) -> None:
    assert verdict(Interval(low, low, high, 5), 0, 1) == expected


def test_verdicts_on_few_seeds_and_open_bounds() -> None:
    assert verdict(Interval(1, 0.5, 1e9, 3), fewest=3) == HOLDS
    assert verdict(Interval(1, 0.5, 1.5, 2), fewest=3) == UNKNOWN == verdict(bootstrap_interval([1.0]))
    assert verdict(Interval(1, 0.5, 1.5, 2), fewest=2) == HOLDS == "holds"


def test_parts_of_a_claim() -> None:
    assert all_of([HOLDS, HOLDS]) == HOLDS
    assert all_of([HOLDS, UNKNOWN]) == UNKNOWN
    assert all_of([UNKNOWN, HOLDS, FAILS]) == FAILS


@pytest.mark.parametrize(
    ("values", "confidence", "message"),
    [
        ([], 0.95, "at least one value"),
        ([1.0, math.nan], 0.95, "finite values"),
        ([1.0, 2.0], 1.0, "confidence must be between 0 and 1"),
    ],
)
def test_what_has_no_interval_is_refused(values: list[float], confidence: float, message: str) -> None:
    with pytest.raises(FedadcError, match=message):
        bootstrap_interval(values, confidence)
    with pytest.raises(FedadcError, match="at least one part"):
        all_of([])


def test_few_values_need_no_torch() -> None:
    code = (
        "import sys; from fedadc.analysis.statistics import bootstrap_interval\n"
        "bootstrap_interval([1.0, 2.0, 4.0]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
