"""Every partition gives every sample one owner and every client a sample, or raises an error that says why not."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedadc.data.dataset import Clients
from fedadc.errors import FedadcError
from fedadc.partitions import IID, PARTITIONS, Dirichlet, Natural, Partition, Pooled, SortAndPartition, partition
from fedadc.rng import generator

ALPHAS = (1e-6, 0.01, 0.5, 10.0, 1e6)
RULES = st.one_of(
    st.just(IID()),
    st.just(Pooled()),
    st.builds(SortAndPartition, labels_per_client=st.integers(1, 6)),
    st.builds(Dirichlet, alpha=st.sampled_from(ALPHAS)),
)


@st.composite
def label_vectors(draw: st.DrawFn, most: int = 60, most_classes: int = 7) -> tuple[np.ndarray, int]:
    """Labels in any order; some of the classes may not occur."""
    classes = draw(st.integers(1, most_classes))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=most))
    return np.array(labels), classes


def deal(rule: Partition, labels: np.ndarray, classes: int, clients: int | None, seed: int = 0) -> Clients:
    return partition(rule, labels, classes, clients, generator(seed, "partition"))


def table(clients: Clients, labels: np.ndarray, classes: int) -> np.ndarray:
    """Samples per client and class, counted one by one."""
    counts = np.zeros((len(clients), classes), dtype=int)
    for k in range(len(clients)):
        for i in clients[k]:
            counts[k, labels[i]] += 1
    return counts


def check_invariants(clients: Clients, samples: int) -> None:
    """Disjoint and complete: the indices are a permutation. No client is empty."""
    assert np.array_equal(np.sort(clients.indices), np.arange(samples))
    assert clients.offsets[0] == 0 and clients.offsets[-1] == samples
    assert clients.sizes.min() >= 1


def equal_labels(per_class: int, classes: int) -> np.ndarray:
    return np.tile(np.arange(classes), per_class)


@settings(max_examples=250)
@given(RULES, label_vectors(), st.integers(1, 70), st.integers(0, 5))
def test_disjoint_complete_and_never_empty(
    rule: Partition, vector: tuple[np.ndarray, int], clients: int, seed: int
) -> None:
    labels, classes = vector
    wanted = None if isinstance(rule, Pooled) else clients
    sizes = np.bincount(labels)
    possible = wanted is None or clients <= len(labels)
    if isinstance(rule, SortAndPartition):
        s, present = rule.labels_per_client, np.count_nonzero(sizes)
        possible &= s <= present <= clients * s <= np.minimum(sizes, clients).sum()
    if not possible:
        with pytest.raises(FedadcError):
            deal(rule, labels, classes, wanted, seed)
        return
    found = deal(rule, labels, classes, wanted, seed)
    assert len(found) == (wanted or 1)
    check_invariants(found, len(labels))


@settings(max_examples=100)
@given(label_vectors(most=6, most_classes=4), st.integers(1, 3), st.integers(1, 4))
def test_sort_refuses_exactly_what_no_assignment_can_do(vector: tuple[np.ndarray, int], clients: int, s: int) -> None:
    """Brute force: among all owner vectors, is there one that gives every client exactly s labels?"""
    labels, classes = vector
    possible = any(
        all(len({y for y, o in zip(labels, owner, strict=True) if o == k}) == s for k in range(clients))
        for owner in itertools.product(range(clients), repeat=len(labels))
    )
    rule = SortAndPartition(labels_per_client=s)
    if possible:
        counts = table(deal(rule, labels, classes, clients), labels, classes)
        assert ((counts > 0).sum(axis=1) == s).all()
    else:
        with pytest.raises(FedadcError):
            deal(rule, labels, classes, clients)


@settings(max_examples=100)
@given(label_vectors(most=150), st.integers(1, 25), st.integers(1, 5), st.integers(0, 3))
def test_sort_gives_s_labels_in_blocks_of_one_size(
    vector: tuple[np.ndarray, int], clients: int, s: int, seed: int
) -> None:
    labels, classes = vector
    try:
        found = deal(SortAndPartition(labels_per_client=s), labels, classes, clients, seed)
    except FedadcError:
        return  # the two tests above say when
    counts = table(found, labels, classes)
    assert ((counts > 0).sum(axis=1) == s).all()
    for column in counts.T:  # a client holds at most one block of a class, so a count is the size of a block
        blocks = column[column > 0]
        assert blocks.size == 0 or blocks.max() - blocks.min() <= 1


@pytest.mark.parametrize(
    ("clients", "s", "classes", "per_class"), [(10, 2, 10, 37), (20, 3, 6, 101), (100, 4, 10, 500)]
)
def test_sort_sizes_are_nearly_equal_for_equal_classes(clients: int, s: int, classes: int, per_class: int) -> None:
    labels = equal_labels(per_class, classes)
    sizes = deal(SortAndPartition(labels_per_client=s), labels, classes, clients).sizes
    assert sizes.max() - sizes.min() <= s  # s blocks that differ by at most one sample each
    assert sizes.sum() == len(labels)


def test_sort_gives_large_classes_more_blocks() -> None:
    """40 blocks for classes of 1000, 500, 250 and 250 are 20, 10, 5 and 5 of exactly 50 samples."""
    labels = np.repeat([0, 1, 2, 3], [1000, 500, 250, 250])
    counts = table(deal(SortAndPartition(labels_per_client=2), labels, 4, 20), labels, 4)
    assert (counts > 0).sum(axis=0).tolist() == [20, 10, 5, 5]
    assert (counts[counts > 0] == 50).all()


@pytest.mark.parametrize(("sizes", "blocks"), [([58, 42], [6, 4]), ([42, 58], [4, 6]), ([90, 5, 5], [8, 1, 1])])
def test_sort_gives_what_is_left_over_to_the_largest_blocks(sizes: list[int], blocks: list[int]) -> None:
    """Of 10 blocks for 58 and 42 samples, 5 and 4 are plain; the tenth goes where blocks are larger (58/5 > 42/4)."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    counts = table(deal(SortAndPartition(labels_per_client=1), labels, len(sizes), 10), labels, len(sizes))
    assert (counts > 0).sum(axis=0).tolist() == blocks


@pytest.mark.parametrize("rule", [IID(), SortAndPartition(labels_per_client=1), Dirichlet(alpha=1e6)])
def test_which_samples_of_a_class_a_client_gets_is_random(rule: Partition) -> None:
    """One class, two clients: halves that are not the first and the second, and others for another seed."""
    halves = [set(deal(rule, np.zeros(100, int), 1, 2, seed)[0].tolist()) for seed in range(20)]
    assert len({frozenset(h) for h in halves}) == 20
    assert all(10 <= len(h & set(range(50))) <= 40 for h in halves)  # 25 ± 6 standard deviations


def chi_square_bound(cells: int) -> float:
    """Mean and five standard deviations of a chi-square variable with cells - 1 degrees of freedom."""
    return (cells - 1) + 5 * np.sqrt(2 * (cells - 1))


def test_sort_deals_uniformly_over_all_tables() -> None:
    """4 clients, 2 of 4 equal classes each: there are 90 such tables, and each comes up equally often.

    90 is the number of 4×4 matrices of zeros and ones whose rows and columns sum to 2.
    """
    labels, seeds = equal_labels(2, 4), 1800
    rule = SortAndPartition(labels_per_client=2)
    held = [table(deal(rule, labels, 4, 4, seed), labels, 4) > 0 for seed in range(seeds)]
    tables = Counter(h.tobytes() for h in held)
    assert len(tables) == 90
    assert sum((n - seeds / 90) ** 2 for n in tables.values()) / (seeds / 90) < chi_square_bound(90)

    pairs = Counter(tuple(np.flatnonzero(h[0])) for h in held)  # of the first client
    assert set(pairs) == set(itertools.combinations(range(4), 2))
    assert sum((n - seeds / 6) ** 2 for n in pairs.values()) / (seeds / 6) < chi_square_bound(6)


def test_sort_is_uniform_where_classes_are_not_equal() -> None:
    """3 clients, 2 labels each, classes of 3, 2 and 1 blocks: each client is equally often the one with the last."""
    labels, seeds = np.repeat([0, 1, 2], [6, 4, 2]), 600
    rule = SortAndPartition(labels_per_client=2)
    holder = Counter(
        int(np.flatnonzero(table(deal(rule, labels, 3, 3, seed), labels, 3)[:, 2])[0]) for seed in range(seeds)
    )
    assert set(holder) == {0, 1, 2}
    assert sum((n - seeds / 3) ** 2 for n in holder.values()) / (seeds / 3) < chi_square_bound(3)


@pytest.mark.parametrize("rule", [IID(), SortAndPartition(labels_per_client=2), Dirichlet(alpha=0.5)])
def test_same_seed_same_partition_other_seed_another(rule: Partition) -> None:
    labels = equal_labels(50, 10)
    first, again, other = (deal(rule, labels, 10, 20, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.indices, again.indices) and np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.indices, other.indices)


def test_iid_sizes_differ_by_at_most_one_and_classes_are_mixed() -> None:
    labels = np.repeat(np.arange(4), 501)
    found = deal(IID(), labels, 4, 10)
    assert set(found.sizes.tolist()) == {200, 201}
    assert table(found, labels, 4).min() > 20  # 50 expected; a standard deviation is about 6


def skew(alpha: float, seed: int, clients: int = 25) -> float:
    """Mean share of a client's largest class: 1 where each has one label, about 1/classes where all are alike."""
    labels = equal_labels(500, 10)
    counts = deal(Dirichlet(alpha=alpha), labels, 10, clients, seed).class_counts(torch.from_numpy(labels), 10)
    return float((counts.max(axis=1) / counts.sum(axis=1)).mean())


@pytest.mark.parametrize("seed", range(3))
def test_a_smaller_alpha_is_more_skewed(seed: int) -> None:
    measured = [skew(alpha, seed) for alpha in (0.02, 0.2, 2.0, 50.0)]
    assert measured == sorted(measured, reverse=True)
    assert measured[0] > 0.8 and measured[-1] < 0.2


def test_extreme_alphas_reach_their_limits() -> None:
    assert skew(1e-6, 0, clients=200) == 1  # one label per client; 200 clients leave no class without a client
    assert skew(1e6, 0) < 0.11  # all clients alike: a tenth each


def dirichlet_reference(draws: list[list[float]], class_sizes: list[int]) -> list[list[int]]:
    """The documented rule in plain Python: rows sum to 1, columns to 1 over clients, cumulative shares rounded."""
    rows = [[g / sum(row) for g in row] for row in draws]
    counts = [[0] * len(class_sizes) for _ in rows]
    for c, size in enumerate(class_sizes):
        total, so_far, before = sum(row[c] for row in rows), 0.0, 0
        for k, row in enumerate(rows):
            so_far += row[c]
            cut = round(so_far / total * size)
            counts[k][c], before = cut - before, cut
    return counts


def filled(sizes: list[int]) -> list[int]:
    """Empty clients take one sample each from the client that is largest at that moment."""
    sizes = list(sizes)
    for k in [k for k, n in enumerate(sizes) if n == 0]:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[k] = 1
    return sizes


@pytest.mark.parametrize("alpha", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("seed", range(4))
def test_dirichlet_counts_are_those_of_the_rule(alpha: float, seed: int) -> None:
    class_sizes, clients = [400, 123, 77], 6
    draws = generator(seed, "partition").standard_gamma(alpha, size=(clients, 3)).tolist()
    expected = dirichlet_reference(draws, class_sizes)
    assert all(sum(row) for row in expected)  # none is empty here, so nothing is moved
    labels = np.repeat(np.arange(3), class_sizes)
    assert table(deal(Dirichlet(alpha=alpha), labels, 3, clients, seed), labels, 3).tolist() == expected


@pytest.mark.parametrize("seed", range(6))
def test_dirichlet_fills_empty_clients_from_the_largest(seed: int) -> None:
    class_sizes, clients = [20, 9, 4], 25
    draws = generator(seed, "partition").standard_gamma(0.2, size=(clients, 3)).tolist()
    before = [sum(row) for row in dirichlet_reference(draws, class_sizes)]
    assert 0 in before
    found = deal(Dirichlet(alpha=0.2), np.repeat(np.arange(3), class_sizes), 3, clients, seed)
    assert sorted(found.sizes.tolist()) == sorted(filled(before))
    kept = [k for k, n in enumerate(before) if n == 1]
    assert (found.sizes[kept] == 1).all()  # a client with one sample never gives it away


@given(st.lists(st.sampled_from(["ann", "bob", "čeněk", ""]), min_size=1, max_size=30))
def test_natural_keeps_the_clients_of_the_data(ids: list[str]) -> None:
    given_ids, names = np.array(ids), sorted(set(ids))
    found = partition(Natural(), np.zeros(len(ids), int), 1, None, generator(0, "p"), given_ids)
    check_invariants(found, len(ids))
    assert [{ids[i] for i in found[k]} for k in range(len(found))] == [{name} for name in names]


def test_pooled_is_one_client_with_everything() -> None:
    found = deal(Pooled(), equal_labels(5, 3), 3, None)
    assert len(found) == 1 and found[0].tolist() == list(range(15))


TEN = equal_labels(3, 10)  # 30 samples


@pytest.mark.parametrize(
    ("rule", "clients", "words"),
    [
        (SortAndPartition(labels_per_client=11), 20, ["labels_per_client is 11", "only 10 classes"]),
        (
            SortAndPartition(labels_per_client=2),
            4,
            ["4 clients × 2 labels", "10 classes", "raise clients or labels_per_client"],
        ),
        (SortAndPartition(labels_per_client=2), 16, ["32 blocks", "fewer clients or labels"]),
        (IID(), 31, ["31 clients", "only 30 samples"]),
        (Dirichlet(alpha=0.5), 31, ["31 clients", "only 30 samples"]),
        (SortAndPartition(labels_per_client=1), 31, ["31 clients", "only 30 samples"]),
        (IID(), 0, ["clients", "at least 1"]),
        (IID(), None, ["clients is missing"]),
        (Natural(), None, ["natural needs client ids"]),
        (Pooled(), 2, ["one client", "clients is 2"]),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(
    rule: Partition, clients: int | None, words: list[str]
) -> None:
    with pytest.raises(FedadcError) as error:
        deal(rule, TEN, 10, clients)
    assert all(word in str(error.value) for word in words), error.value


def test_impossible_settings_are_refused_when_they_are_made() -> None:
    with pytest.raises(FedadcError, match=r"^labels_per_client must be at least 1, not 0\.$"):
        SortAndPartition(labels_per_client=0)
    for alpha in (0.0, -1, math.nan, math.inf):
        with pytest.raises(FedadcError, match=r"^alpha must be positive and finite, not"):
            Dirichlet(alpha=alpha)


def test_natural_refuses_another_number_of_clients() -> None:
    ids = np.array(["a", "b", "a"])
    with pytest.raises(FedadcError, match=r"clients is 3, but the data names 2"):
        partition(Natural(), np.zeros(3, int), 1, 3, generator(0, "p"), ids)
    assert len(partition(Natural(), np.zeros(3, int), 1, 2, generator(0, "p"), ids)) == 2


def test_the_table_of_rules_is_complete() -> None:
    assert set(PARTITIONS.values()) == set(Partition.__subclasses__())


@pytest.mark.slow
@pytest.mark.parametrize("rule", [IID(), SortAndPartition(labels_per_client=2), Dirichlet(alpha=0.5)])
def test_a_million_clients(rule: Partition) -> None:
    clients, classes = 10**6, 10
    labels = equal_labels(10**6, classes)
    start = time.perf_counter()
    found = deal(rule, labels, classes, clients)
    seconds = time.perf_counter() - start
    print(f"{rule}: {seconds:.1f} s")
    assert seconds < 60
    assert (np.bincount(found.indices, minlength=len(labels)) == 1).all()
    assert len(found) == clients and found.sizes.min() >= 1 and found.offsets[-1] == len(labels)
    counts = found.class_counts(torch.from_numpy(labels), classes)
    assert np.array_equal(counts.sum(axis=0), np.full(classes, 10**6))
    if isinstance(rule, SortAndPartition):
        assert ((counts > 0).sum(axis=1) == 2).all() and (counts[counts > 0] == 5).all()
    if isinstance(rule, IID):
        assert (found.sizes == 10).all()
