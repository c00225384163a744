"""Hold out a seeded, stratified share of the training data, as a test or validation split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedadc.data.dataset import Array, Dataset
from fedadc.errors import require
from fedadc.rng import generator


def stratified(labels: Array, share: float, rng: np.random.Generator, keep: Array | None = None) -> Array:
    """A mask that selects about `share` of every class, but never a whole class and never a sample in `keep`."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        wanted = min(round(share * len(members)), len(members) - 1)
        free = members if keep is None else members[~keep[members]]
        chosen[rng.permutation(free)[: max(wanted, 0)]] = True
    return chosen


def hold_out(data: Dataset, share: float, part: str, seed: int) -> Dataset:
    """Move a stratified share of the training samples into `part` ("test" or "validation")."""
    require(0 < share < 1, f"data.{part} as a share must be between 0 and 1, not {share}.")
    labels = data.train.y.numpy()
    keep = None
    if data.owners is not None:  # every client of a natural federation keeps at least one sample
        keep = np.zeros(len(labels), dtype=bool)
        keep[np.unique(data.owners, return_index=True)[1]] = True
    mask = stratified(labels, share, generator(seed, f"hold out {part}"), keep)
    require(bool(mask.any()), f"data.{part}: a share of {share} of {len(labels)} samples is empty; increase it.")
    remaining, held_out = np.flatnonzero(~mask), np.flatnonzero(mask)
    owners = None if data.owners is None else data.owners[remaining]
    held_out_owners = None if data.owners is None else data.owners[held_out]
    split = replace(data, train=data.train.take(remaining), owners=owners)
    if part == "validation":
        return replace(split, validation=data.train.take(held_out), validation_owners=held_out_owners)
    return replace(split, test=data.train.take(held_out), test_owners=held_out_owners)
