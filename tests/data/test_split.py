"""Held-out shares: seeded, disjoint, spread over the classes. Natural clients hold out their own, as if alone."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedadc.data import Dataset, HeldOut, Samples, from_arrays
from fedadc.data.split import SplitRows, stratified
from fedadc.errors import FedadcError

SHARES = st.floats(0.01, 0.99)
LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=120).map(np.array)
ROWS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 4)), min_size=1, max_size=120)  # client and label
NATURAL = ROWS.map(lambda rows: (np.array([who for who, _ in rows]), np.array([label for _, label in rows])))


def numbered(labels: np.ndarray, owners: np.ndarray | None = None) -> Dataset:
    """Each sample's only feature is its number, so that it can be followed into a part."""
    return from_arrays(np.arange(len(labels), dtype=np.float64)[:, None], labels, owners=owners)


def numbers(part: Samples | None) -> list[int]:
    assert part is not None
    return part.x[:, 0].int().tolist()


def parts(rows: SplitRows) -> list[list[int]]:
    return [rows.train.tolist(), rows.validation.tolist(), rows.test.tolist()]


@settings(max_examples=80)
@given(LABELS, SHARES, st.integers(0, 3))
def test_every_class_of_pooled_data_gives_its_share(labels: np.ndarray, share: float, seed: int) -> None:
    mask = stratified(labels, share, np.random.default_rng(seed))
    for label in np.unique(labels):
        members, chosen = np.sum(labels == label), np.sum(mask[labels == label])
        assert abs(chosen - share * members) <= 1
        assert chosen < members  # a class never leaves training


@pytest.mark.parametrize("part", ["test", "validation"])
@pytest.mark.parametrize("owners", [None, np.arange(200) % 7])
def test_samples_move_with_their_labels_and_clients(part: str, owners: np.ndarray | None) -> None:
    labels = np.random.default_rng(0).integers(3, size=200)
    data = numbered(labels, owners)
    split = HeldOut(**{part: 0.25}, seed=5)(data)
    held = getattr(split, part)
    assert sorted(numbers(split.train) + numbers(held)) == list(range(200))
    for samples, who in ((split.train, split.owners), (held, getattr(split, f"{part}_owners"))):
        assert samples.y.tolist() == labels[numbers(samples)].tolist()
        assert who is None if owners is None else who.tolist() == owners[numbers(samples)].tolist()
    assert abs(len(held) - 50) <= 4
    assert split.classes == data.classes and split.normalization == data.normalization


@pytest.mark.parametrize("owners", [None, np.arange(200) // 50])
def test_shares_are_seeded_and_test_and_validation_are_different_draws(owners: np.ndarray | None) -> None:
    data = numbered(np.arange(200) % 4, owners)
    first, again, other = (numbers(HeldOut(test=0.2, seed=seed)(data).test) for seed in (1, 1, 2))
    assert first == again != other
    assert numbers(HeldOut(validation=0.2, seed=1)(data).validation) != first


@pytest.mark.parametrize("owners", [None, np.arange(100) // 50])
def test_the_validation_share_is_one_of_the_rest(owners: np.ndarray | None) -> None:
    data = numbered(np.arange(100) % 2, owners)
    both = HeldOut(0.2, 0.25, seed=0)(data)
    found = [numbers(samples) for samples in both.splits().values()]
    assert [len(part) for part in found] == [60, 20, 20]
    assert sorted(itertools.chain(*found)) == list(range(100))
    assert numbers(both.test) == numbers(HeldOut(0.2, seed=0)(data).test)


@settings(max_examples=150)
@given(NATURAL, SHARES, st.integers(0, 3))
def test_a_client_gives_its_share_and_keeps_a_sample_of_every_class(
    rows: tuple[np.ndarray, np.ndarray], share: float, seed: int
) -> None:
    owners, labels = rows
    found = HeldOut(share, seed=seed).rows(labels, owners)
    assert sorted([*found.train, *found.test]) == list(range(len(labels))) and not len(found.validation)
    assert found.train.tolist() == sorted(found.train) and found.test.tolist() == sorted(found.test)
    cells, held = (
        Counter(zip(owners, labels, strict=True)),
        Counter(zip(owners[found.test], labels[found.test], strict=True)),
    )
    for client in set(owners):
        own = {cell: n for cell, n in cells.items() if cell[0] == client}
        quotas = {cell: min(share * n, n - 1) for cell, n in own.items()}
        for cell, quota in quotas.items():
            assert held[cell] < own[cell]
            assert abs(held[cell] - quota) < 1
        assert abs(sum(held[cell] for cell in own) - sum(quotas.values())) <= 0.5 + 1e-9


@settings(max_examples=100)
@given(NATURAL, SHARES, st.data())
def test_a_client_alone_holds_out_the_same_rows(
    rows: tuple[np.ndarray, np.ndarray], share: float, data: st.DataObject
) -> None:
    """Other clients' rows do not matter, nor in which order clients' rows alternate, nor what labels are called."""
    owners, labels = rows
    held_out = HeldOut(share, data.draw(SHARES), seed=3)
    together = parts(held_out.rows(labels, owners))
    names = np.array(data.draw(st.permutations(["x", "10", "-1", "é", "zero"])))
    for client in set(owners):
        own = np.flatnonzero(owners == client)
        alone = held_out.rows(names[labels[own]], np.full(len(own), client))
        assert [own[part].tolist() for part in (alone.train, alone.validation, alone.test)] == [
            [row for row in part if owners[row] == client] for part in together
        ]


@given(NATURAL, SHARES)
def test_clients_may_stand_in_the_file_in_any_order(rows: tuple[np.ndarray, np.ndarray], share: float) -> None:
    owners, labels = rows
    order = np.argsort(owners, kind="stable")[::-1]
    order = np.concatenate([np.flatnonzero(owners == client) for client in dict.fromkeys(owners[order])])
    found = HeldOut(share).rows(labels[order], owners[order])
    assert sorted(order[found.test]) == HeldOut(share).rows(labels, owners).test.tolist()


def test_clients_draw_differently_and_every_row_is_as_likely() -> None:
    owners, labels = np.repeat(np.arange(4000), 10), np.tile(np.arange(10) % 2, 4000)
    held = HeldOut(0.2, seed=1).rows(labels, owners).test
    times = np.bincount(held % 10, minlength=10)  # each is binomial: 4000 draws with probability 1/5
    assert times.sum() == 8000 and np.abs(times - 800).max() < 5 * np.sqrt(800 * 0.8)
    assert len({tuple(held[held // 10 == client] % 10) for client in range(4000)}) == 25  # all pairs, one of each class


def test_remainders_go_to_the_classes_at_random_where_they_are_equal() -> None:
    """0.6 samples of each class are 1.2 in all: every client gives one sample, of either class."""
    owners, labels = np.repeat(np.arange(1000), 4), np.tile([0, 0, 1, 1], 1000)
    held = HeldOut(0.3, seed=0).rows(labels, owners).test
    assert np.bincount(held // 4).tolist() == [1] * 1000
    assert abs(np.bincount(labels[held])[0] - 500) < 5 * np.sqrt(250)


def test_the_rows_of_a_known_client_never_change() -> None:
    """Real sites rely on it: these rows were held out when the rule was made."""
    labels = np.array(list("aababcabca"))
    found = HeldOut(0.3, 0.3, seed=7).rows(labels, np.full(10, "north"))
    assert parts(found) == [[1, 3, 7, 8, 9], [2, 6], [0, 4, 5]]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5, float("nan")])
@pytest.mark.parametrize("part", ["test", "validation"])
def test_a_share_outside_0_and_1_is_refused(part: str, share: float) -> None:
    with pytest.raises(FedadcError, match=rf"^{part} must be a share between 0 and 1, not {share!r}\.$"):
        HeldOut(**{part: share})


def test_a_share_too_small_for_any_sample_is_refused() -> None:
    with pytest.raises(FedadcError, match=r"^test: a share of 0.01 of 10 samples is empty; increase it"):
        HeldOut(0.01)(numbered(np.arange(10) % 2))
    with pytest.raises(FedadcError, match=r"^validation: a share of 0.005 of 80 samples is empty; increase it"):
        HeldOut(0.2, 0.005)(numbered(np.arange(100) % 2, np.zeros(100)))


def test_clients_of_one_sample_each_leave_nothing_to_hold_out() -> None:
    with pytest.raises(FedadcError, match="empty"):
        HeldOut(0.5)(numbered(np.arange(10) % 2, np.arange(10)))


def test_test_data_is_not_replaced() -> None:
    data = HeldOut(0.5)(numbered(np.arange(10) % 2))
    with pytest.raises(FedadcError, match="already has test data; remove test"):
        HeldOut(0.5)(data)
    assert len(HeldOut(validation=0.5)(data).validation or ()) == 4


@given(LABELS, SHARES)
def test_nothing_to_hold_out_leaves_the_data_alone(labels: np.ndarray, share: float) -> None:
    assume(len(set(labels.tolist())) > 1)
    assert numbers(HeldOut()(numbered(labels)).train) == list(range(len(labels)))
