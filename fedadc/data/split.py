"""Seeded, stratified shares: a test part for data that has none, a validation part for choosing settings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedadc.data.dataset import Array, Dataset
from fedadc.errors import require
from fedadc.rng import generator


def stratified(labels: Array, share: float, rng: np.random.Generator, keep: Array | None = None) -> Array:
    """A mask of about `share` of every class. Samples in `keep` are never chosen; each class leaves one behind."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        wanted = min(round(share * len(members)), len(members) - 1)
        free = members if keep is None else members[~keep[members]]
        chosen[rng.permutation(free)[: max(wanted, 0)]] = True
    return chosen


def hold_out(data: Dataset, share: float, part: str, seed: int) -> Dataset:
    """Move a stratified share of the training samples into `part` ("test" or "validation")."""
    require(0 < share < 1, f"data.{part} as a share must lie between 0 and 1, not {share}.")
    labels = data.train.y.numpy()
    keep = None
    if data.owners is not None:  # no client of a natural federation may lose its last sample
        keep = np.zeros(len(labels), dtype=bool)
        keep[np.unique(data.owners, return_index=True)[1]] = True
    mask = stratified(labels, share, generator(seed, f"hold out {part}"), keep)
    require(bool(mask.any()), f"data.{part}: a share of {share} of {len(labels)} samples is empty; raise it.")
    train, held = np.flatnonzero(~mask), np.flatnonzero(mask)
    owners = None if data.owners is None else data.owners[train]
    split = replace(data, train=data.train.take(train), owners=owners)
    held_by = None if data.owners is None else data.owners[held]
    if part == "validation":
        return replace(split, validation=data.train.take(held), validation_owners=held_by)
    return replace(split, test=data.train.take(held), test_owners=held_by)
