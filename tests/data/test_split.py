"""Held-out parts: stratified, seeded, disjoint, and no client of a natural federation is emptied."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedadc.data import Dataset, Samples, from_arrays
from fedadc.data.split import hold_out, stratified
from fedadc.errors import FedadcError

SHARES = st.floats(0.01, 0.99)
LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=120).map(np.array)


def numbered(labels: np.ndarray, owners: np.ndarray | None = None) -> Dataset:
    """Each sample's only feature is its number, so that it can be followed into a part."""
    return from_arrays(np.arange(len(labels), dtype=np.float64)[:, None], labels, owners=owners)


def numbers(part: Samples) -> list[int]:
    return part.x[:, 0].int().tolist()


@settings(max_examples=80)
@given(LABELS, SHARES, st.integers(0, 3))
def test_every_class_gives_its_share(labels: np.ndarray, share: float, seed: int) -> None:
    mask = stratified(labels, share, np.random.default_rng(seed))
    for label in np.unique(labels):
        members, chosen = np.sum(labels == label), np.sum(mask[labels == label])
        assert abs(chosen - share * members) <= 1
        assert chosen < members  # a class never leaves training


@settings(max_examples=80)
@given(LABELS, SHARES, st.data())
def test_kept_samples_stay_and_the_rest_makes_up_for_them(
    labels: np.ndarray, share: float, data: st.DataObject
) -> None:
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(labels), max_size=len(labels))))
    mask = stratified(labels, share, np.random.default_rng(0), keep)
    assert not (mask & keep).any()
    for label in np.unique(labels):
        of_class = labels == label
        free = np.sum(of_class & ~keep)
        assert np.sum(mask[of_class]) >= min(free, share * np.sum(of_class) - 1)


@pytest.mark.parametrize("part", ["test", "validation"])
def test_hold_out_moves_samples_with_their_labels(part: str) -> None:
    labels = np.random.default_rng(0).integers(3, size=200)
    data = numbered(labels)
    split = hold_out(data, 0.25, part, seed=5)
    held = getattr(split, part)
    assert sorted(numbers(split.train) + numbers(held)) == list(range(200))
    for samples in (split.train, held):
        assert samples.y.tolist() == labels[numbers(samples)].tolist()
    assert abs(len(held) - 50) <= 3
    assert split.classes == data.classes and split.normalization == data.normalization


def test_hold_out_is_seeded_and_test_and_validation_are_different_draws() -> None:
    data = numbered(np.arange(200) % 4)
    first, again, other = (numbers(hold_out(data, 0.2, "test", seed).test) for seed in (1, 1, 2))
    assert first == again != other
    assert numbers(hold_out(data, 0.2, "validation", 1).validation) != first


def test_a_second_part_leaves_the_first_alone() -> None:
    both = hold_out(hold_out(numbered(np.arange(100) % 2), 0.2, "test", 0), 0.25, "validation", 0)
    parts = [numbers(p) for p in both.splits().values()]
    assert [len(p) for p in parts] == [60, 20, 20]
    assert sorted(itertools.chain(*parts)) == list(range(100))


@settings(max_examples=80)
@given(LABELS, SHARES, st.data())
def test_natural_clients_keep_a_sample_and_their_own_samples(
    labels: np.ndarray, share: float, data: st.DataObject
) -> None:
    assume(len(set(labels.tolist())) > 1)
    owners = np.array(data.draw(st.lists(st.sampled_from("abcdefgh"), min_size=len(labels), max_size=len(labels))))
    try:
        split = hold_out(numbered(labels, owners), share, "test", 0)
    except FedadcError as error:
        assert "increase it" in str(error)  # nothing was left to hold out
        return
    assert set(split.owners.tolist()) == set(owners.tolist())
    assert split.owners.tolist() == owners[numbers(split.train)].tolist()
    assert not set(numbers(split.train)) & set(numbers(split.test))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_share_outside_0_and_1_is_refused(share: float) -> None:
    with pytest.raises(FedadcError, match=r"data.validation as a share must be between 0 and 1"):
        hold_out(numbered(np.arange(10) % 2), share, "validation", 0)


def test_a_share_too_small_for_any_sample_is_refused() -> None:
    with pytest.raises(FedadcError, match=r"share of 0.01 of 10 samples is empty; increase it"):
        hold_out(numbered(np.arange(10) % 2), 0.01, "test", 0)


def test_clients_of_one_sample_each_leave_nothing_to_hold_out() -> None:
    data = replace(numbered(np.arange(10) % 2), owners=np.arange(10))
    with pytest.raises(FedadcError, match="empty"):
        hold_out(data, 0.5, "test", 0)
