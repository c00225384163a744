"""Bootstrap intervals: the draws are what they are said to be, and cover what they say."""

from __future__ import annotations

import numpy as np
import pytest

from fedadc.errors import FedadcError
from fedadc.evaluation.intervals import percentile_intervals
from fedadc.rng import generator


def test_draws_are_from_the_seed_and_their_purpose() -> None:
    values = np.random.default_rng(0).normal(size=50)
    found = percentile_intervals(lambda rows: {"mean": float(values[rows].mean())}, 50, seed=3)
    rng = generator(3, "bootstrap of rows")
    means = [values[rng.integers(50, size=50)].mean() for _ in range(1000)]
    assert found["mean"] == pytest.approx((np.quantile(means, 0.025), np.quantile(means, 0.975)), rel=1e-12)
    assert found == percentile_intervals(lambda rows: {"mean": float(values[rows].mean())}, 50, seed=3)
    assert found != percentile_intervals(lambda rows: {"mean": float(values[rows].mean())}, 50, seed=4)


def test_whole_clients_are_drawn() -> None:
    clients = [np.array([0, 1, 2]), np.array([3]), np.array([4, 5])]

    def figures(rows: np.ndarray) -> dict[str, float | None]:
        counts = np.bincount(rows, minlength=6)
        assert counts[0] == counts[1] == counts[2] and counts[4] == counts[5]
        assert counts[[0, 3, 4]].sum() == 3
        return {"first": float(counts[0]), "never": None, "sometimes": 1.0 if counts[0] else None}

    found = percentile_intervals(figures, 6, 0, clients, draws=200)
    assert found["first"] == (0.0, 3.0) and found["sometimes"] == (1.0, 1.0) and "never" not in found


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    hits, trials = 0, 150
    for trial in range(trials):
        right = np.random.default_rng(trial).random(200) < 0.8
        low, high = percentile_intervals(
            lambda rows, right=right: {"a": float(right[rows].mean())}, 200, trial, draws=300
        )["a"]  # type: ignore[misc]
        hits += low <= 0.8 <= high
    assert 0.88 <= hits / trials <= 0.99


def test_degenerate_intervals() -> None:
    assert percentile_intervals(lambda rows: {"a": 1.0}, 0, 0) == {}
    assert percentile_intervals(lambda rows: {"a": 1.0}, 1, 0) == {"a": (1.0, 1.0)}
    with pytest.raises(FedadcError, match="confidence must be between 0 and 1, not 95"):
        percentile_intervals(lambda rows: {}, 3, 0, confidence=95)
