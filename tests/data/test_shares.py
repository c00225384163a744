"""Each client's own share of the test samples."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedadc.data.dataset import Clients
from fedadc.data.shares import local_shares
from fedadc.partitions import Dirichlet, SortAndPartition
from fedadc.rng import generator

LABELS, TEST = np.repeat(np.arange(10), 200), np.repeat(np.arange(10), 100)


def counts_of(clients: Clients, labels: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(labels[clients[k]], minlength=10) for k in range(len(clients))])


def test_a_dirichlet_clients_proportions_are_those_of_its_training_share() -> None:
    held = Clients.from_owner(Dirichlet(alpha=0.1).owners(LABELS, 10, 20, generator(0, "partition")), 20)
    trained = counts_of(held, LABELS)
    tested = counts_of(local_shares(TEST, trained, generator(0, "shares")), TEST)
    assert np.abs(tested - trained / 2).max() <= 1  # rounded to whole samples
    assert tested.sum() == len(TEST)


def test_a_sort_and_partition_client_is_tested_on_its_own_labels() -> None:
    rule = SortAndPartition(labels_per_client=3)
    held = Clients.from_owner(rule.owners(LABELS, 10, 20, generator(0, "partition")), 20)
    trained = counts_of(held, LABELS)
    tested = counts_of(local_shares(TEST, trained, generator(0, "shares")), TEST)
    assert np.array_equal(tested > 0, trained > 0)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 40), st.integers(0, 2**32))
def test_shares_are_disjoint_and_all_that_somebody_holds(clients: int, classes: int, many: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts, labels = rng.integers(0, 4, (clients, classes)), rng.integers(0, classes, many)
    shares = local_shares(labels, counts, rng)
    assert len(shares) == clients
    dealt = np.sort(shares.indices)
    assert np.array_equal(dealt, np.flatnonzero(counts.sum(axis=0)[labels] > 0))
    for k in range(clients):
        assert (counts[k][labels[shares[k]]] > 0).all()  # nobody is tested on what it never saw
