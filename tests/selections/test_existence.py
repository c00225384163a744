"""The search for a covering cohort: its answers yes and no agree with brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedadc.data.dataset import Array
from fedadc.selections.existence import cover_exists, why_none
from fedadc.selections.reports import ReportedClasses


def truth(counts: Array, size: int, at_least: int = 1) -> bool:
    return any((counts[list(c)].sum(axis=0) >= at_least).all() for c in combinations(range(len(counts)), size))


@settings(max_examples=300)
@given(st.data())
def test_verdicts_agree_with_brute_force(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    clients, classes = data.draw(st.integers(1, 10)), data.draw(st.sampled_from([1, 2, 4, 6, 9, 66]))
    share = data.draw(st.sampled_from([0.15, 0.3, 0.5, 0.8, 0.97]))
    counts = rng.integers(1, 4, size=(clients, classes)) * (rng.random((clients, classes)) < share)
    size, at_least = data.draw(st.integers(1, clients)), data.draw(st.integers(1, 4))
    if why_none(counts, size, at_least):
        assert not truth(counts, size, at_least)
    held = ReportedClasses.of(counts > 0)
    if counts.any(axis=0).all():
        assert cover_exists(held, classes, size) is truth(counts, size)
    hasty = cover_exists(held, classes, size, budget=data.draw(st.integers(0, 60)))
    assert hasty is None or hasty is truth(counts, size)


def test_a_search_that_takes_too_long_gives_up() -> None:
    rng = np.random.default_rng(0)
    held = ReportedClasses.of(rng.random((200, 60)) < 0.2)
    assert cover_exists(held, 60, 5, budget=2000) is None
    assert cover_exists(held, 60, 30, budget=10_000) is True


def test_many_clients_of_few_kinds_are_searched_to_the_end() -> None:
    """Ten thousand clients with one of three pairs of classes each: two of them never hold all four."""
    pairs = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]], dtype=bool)
    assert cover_exists(ReportedClasses.of(pairs[np.arange(10_000) % 3]), 4, 2) is False
    assert cover_exists(ReportedClasses.of(pairs[np.arange(10_000) % 3]), 4, 3) is True


def test_more_than_two_thousand_sets_are_searched_without_dropping_any() -> None:
    rng = np.random.default_rng(1)
    sets = np.unique(rng.random((4000, 14)) < 0.4, axis=0)
    assert len(sets) > 2000
    assert cover_exists(ReportedClasses.of(sets), 14, 2) is truth(sets, 2)
