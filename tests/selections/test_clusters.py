"""Cluster selection: the labels of a cohort are closer to uniform, and all clients are chosen equally often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedadc.data.dataset import Array
from fedadc.errors import FedadcError
from fedadc.partitions import Dirichlet, Partition, SortAndPartition, partition
from fedadc.rng import generator
from fedadc.selections import Clusters, Covering, Selection, Uniform
from fedadc.selections import clusters as module
from fedadc.selections.clusters import cluster_of


def partitioned(rule: Partition, seed: int = 0) -> Array:
    """Label counts of 100 clients, for 10 classes of 500 samples each."""
    labels = np.repeat(np.arange(10), 500)
    return partition(rule, labels, 10, 100, generator(seed, "partition")).class_counts(torch.from_numpy(labels), 10)


def cohorts(rule: Selection, counts: Array, size: int, rounds: int = 300, seed: int = 0) -> list[Array]:
    choose = rule.chooser(len(counts), size, lambda: counts, generator(seed, "selection"))
    return [choose(generator(seed, "cohort", t)) for t in range(rounds)]


def skew(rule: Selection, counts: Array, size: int) -> float:
    """Mean total variation between a cohort's labels and uniform ones; clients weigh alike, as in FedAvg's mean."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    unions = np.stack([shares[c].mean(axis=0) for c in cohorts(rule, counts, size)])
    return float(np.abs(unions - 0.1).sum(axis=1).mean() / 2)


@pytest.mark.parametrize(
    "rule", [SortAndPartition(labels_per_client=2), Dirichlet(alpha=0.1)], ids=["sort", "dirichlet"]
)
@pytest.mark.parametrize("reports", ["histograms", "classes"])
def test_unions_are_nearer_to_uniform(rule: Partition, reports: str) -> None:
    # With a Dirichlet partition, knowing the classes of a client says little about their proportions.
    little_information = isinstance(rule, Dirichlet) and reports == "classes"
    for seed in range(3):
        counts = partitioned(rule, seed)
        for size, much in ((10, 0.8), (20, 0.8), (5, 0.95)):
            less = skew(Clusters(reports=reports), counts, size) / skew(Uniform(), counts, size)
            assert less < (1.02 if little_information else much), (seed, size)


def test_covering_cohorts_are_nearer_to_uniform_too() -> None:
    counts = partitioned(SortAndPartition(labels_per_client=2))
    assert skew(Covering(), counts, 5) < 0.05 < 0.3 < skew(Uniform(), counts, 5)


def test_clear_clusters_are_found_and_each_gives_one() -> None:
    rng = np.random.default_rng(0)
    kind = rng.permutation(np.repeat(np.arange(4), 10))
    counts = np.eye(4, dtype=int)[kind] * 50 + rng.integers(0, 3, size=(40, 4))
    for seed in range(5):
        assert all(set(kind[c]) == {0, 1, 2, 3} for c in cohorts(Clusters(), counts, 4, 20, seed))


def test_every_client_takes_part_equally_often() -> None:
    counts = np.repeat(np.eye(3, dtype=int), [1, 5, 20], axis=0)
    for size in (2, 7):
        seen = np.bincount(np.concatenate(cohorts(Clusters(), counts, size, 4000)), minlength=26)
        assert seen.sum() == 4000 * size and chisquare(seen).pvalue > 1e-4


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_clusters_have_their_shares_rounded_down_or_up(sizes: Sequence[int], data: st.DataObject) -> None:
    kind = np.repeat(np.arange(len(sizes)), sizes)
    size = data.draw(st.integers(1, len(kind)))
    for cohort in cohorts(Clusters(count=len(sizes)), np.eye(len(sizes), dtype=int)[kind], size, 5):
        exact = np.array(sizes) * size / len(kind)
        taken = np.bincount(kind[cohort], minlength=len(sizes))
        assert len(set(cohort.tolist())) == size and (np.abs(taken - exact) < 1).all()


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 15), st.integers(0, 99))
def test_no_more_clusters_than_asked_for_or_than_points_differ(n: int, classes: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = rng.integers(0, 2, size=(n, classes)).astype(float)
    found = cluster_of(points, count, rng)
    assert len(set(found.tolist())) <= min(count, len(np.unique(points, axis=0)))
    for point in points:  # equal points are in the same cluster
        assert len(set(found[(points == point).all(axis=1)].tolist())) == 1
    if count >= len(np.unique(points, axis=0)):
        assert len(set(found.tolist())) == len(np.unique(points, axis=0))


def test_lloyd_leaves_every_point_with_the_mean_nearest_to_it() -> None:
    points = np.random.default_rng(3).dirichlet(np.full(6, 0.3), size=200)
    found = cluster_of(points, 7, np.random.default_rng(0))
    means = np.stack([points[found == c].mean(axis=0) for c in range(7)])
    assert (((points[:, None] - means) ** 2).sum(axis=2).argmin(axis=1) == found).all()


def test_many_clients_are_clustered_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE", 50)
    kind = np.random.default_rng(0).integers(3, size=5000)
    found = cluster_of(np.eye(3)[kind], 3, np.random.default_rng(0))
    assert len(set(zip(kind.tolist(), found.tolist(), strict=True))) == 3


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 3, 100])  # there is only one cluster, whatever the setting
def test_identical_clients_are_drawn_uniformly(size: int, count: int) -> None:
    counts = np.ones((8, 3), dtype=int)
    seen = np.bincount(np.concatenate(cohorts(Clusters(count=count), counts, size, 2000)), minlength=8)
    assert seen.sum() == 2000 * size and chisquare(seen).pvalue > 1e-4


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(FedadcError, match="count must be at least 1, not 0"):
        Clusters(count=0)
    with pytest.raises(FedadcError, match="reports must be 'histograms' or 'classes', not"):
        Clusters(reports="names")  # type: ignore[arg-type]
