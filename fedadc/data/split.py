"""Hold out shares of the training data, as test and validation data.

Pooled data is stratified by class. A natural client holds out its own shares: they depend on its rows, its name and the
seed, never on other clients, so that a real site with nothing but its own rows holds out the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fedadc.data.dataset import Array, Dataset
from fedadc.errors import require
from fedadc.fields.settings import Settings
from fedadc.rng import generator

DEFAULT_TEST_SHARE = 0.2  # of data without test samples


@dataclass(frozen=True)
class SplitRows:
    """The row numbers of every split, in ascending order."""

    train: Array
    validation: Array
    test: Array


@dataclass(frozen=True)
class HeldOut(Settings):
    """The shares to hold out: first the test share, then the validation share of the rest. None: nothing."""

    test: float | None = None
    validation: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in ("test", "validation"):
            share = getattr(self, part)
            require(share is None or 0 < share < 1, f"{part} must be a share between 0 and 1, not {share}.")

    def rows(self, labels: Array, owners: Array | None = None, names: Sequence[str] | None = None) -> SplitRows:
        """The rows of every split, from the class and, in a natural federation, the client of every row.

        Clients are positions in the sorted `names`; without these, names themselves.
        """
        train, held = np.arange(len(labels)), {}
        if owners is not None and names is None:
            found, owners = np.unique(owners, return_inverse=True)
            names, owners = [str(name) for name in found], owners.reshape(-1)
        for part in ("test", "validation"):
            mask = self._mask(part, labels[train], None if owners is None else owners[train], names or ())
            train, held[part] = train[~mask], train[mask]
        return SplitRows(train, held["validation"], held["test"])

    def _mask(self, part: str, labels: Array, owners: Array | None, names: Sequence[str]) -> Array:
        share = getattr(self, part)
        if share is None:
            return np.zeros(len(labels), dtype=bool)
        if owners is None:
            return stratified(labels, share, self._rng(part))
        return by_client(labels, owners, names, share, partial(self._rng, part))

    def _rng(self, part: str, client: int | str = -1) -> np.random.Generator:
        return generator(self.seed, f"hold out {part}", client=client)

    def __call__(self, data: Dataset) -> Dataset:
        """The data set with these shares of its training samples in splits of their own."""
        return self.divide(data, self.rows(data.task.strata(data.train.y), data.owners))

    def divide(self, data: Dataset, rows: SplitRows) -> Dataset:
        """The data set with the training samples divided in this way."""
        require(self.test is None or data.test is None, f"data {data.name} already has test data; remove test.")
        divided = replace(data, train=data.train.take(rows.train), owners=_of(data.owners, rows.train))
        for part in ("test", "validation"):
            share, held = getattr(self, part), getattr(rows, part)
            if share is None:
                continue
            samples = len(data.train) - (len(rows.test) if part == "validation" else 0)
            why = "increase it, or see whether classes have single samples, which are never held out"
            require(len(held) > 0, f"{part}: a share of {share} of {samples} samples is empty; {why}.")
            fields = {part: data.train.take(held), f"{part}_owners": _of(data.owners, held)}
            divided = replace(divided, **fields)  # type: ignore[arg-type]
        return divided


def _of(owners: Array | None, rows: Array) -> Array | None:
    return None if owners is None else owners[rows]


def stratified(labels: Array, share: float, rng: np.random.Generator) -> Array:
    """A mask that selects about `share` of every class, but never a whole class."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        wanted = min(round(share * len(members)), len(members) - 1)
        chosen[rng.permutation(members)[: max(wanted, 0)]] = True
    return chosen


def by_client(
    labels: Array, owner: Array, names: Sequence[str], share: float, rng_of: Callable[[str], np.random.Generator]
) -> Array:
    """A mask that selects about `share` of every client, spread over its classes, but never a whole class of a client.

    Every client draws from its own generator. Its classes are taken in the order in which they appear in its rows, so
    that the names and numbers of the classes do not matter, and nothing that other clients have. The steps between the
    draws are done for all clients at once.
    """
    cell, client, size = _cells(labels, owner)
    order, draw = _order(owner, len(names)), np.empty(len(labels))
    ties = np.empty(len(client))
    row_ends, cell_ends = (
        np.cumsum(np.bincount(numbers, minlength=len(names))).tolist() for numbers in (owner, client)
    )
    row = first = 0
    for name, row_end, cell_end in zip(names, row_ends, cell_ends, strict=True):
        rng = rng_of(name)
        draw[row:row_end], ties[first:cell_end] = rng.random(row_end - row), rng.random(cell_end - first)
        row, first = row_end, cell_end
    wanted = _wanted(client, size, share, ties)
    mask = np.zeros(len(labels), dtype=bool)
    by_draw = order[np.argsort(draw, kind="stable")]
    by_cell = by_draw[_order(cell[by_draw], len(client))]
    mask[by_cell] = _rank(cell[by_cell]) < wanted[cell[by_cell]]
    return mask


def _cells(labels: Array, owner: Array) -> tuple[Array, Array, Array]:
    """The cell (a class of a client) of every row, and the client and size of every cell.

    Cells are numbered by client, those of a client by their first rows.
    """
    if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0:
        labels = np.unique(labels, return_inverse=True)[1].reshape(-1)
    classes = int(labels.max(initial=0)) + 1
    pair = owner.astype(np.int64) * classes + labels
    rows = _order(pair, int(pair.max(initial=0)) + 1)
    begins = np.flatnonzero(np.diff(pair[rows], prepend=-1))
    client, first, size = pair[rows[begins]] // classes, rows[begins], np.diff(begins, append=len(rows))
    order = np.lexsort((first, client))
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    cell = np.empty_like(rows)
    cell[rows] = np.repeat(number, size)
    return cell, client[order], size[order]


def _order(numbers: Array, count: int) -> Array:
    """A stable order of numbers in 0..count - 1. NumPy sorts small types in linear time."""
    return np.argsort(numbers.astype(np.min_scalar_type(count)), kind="stable")


def _wanted(client: Array, size: Array, share: float, ties: Array) -> Array:
    """How many rows of every cell are held out: whole parts of the quotas first, then the largest remainders."""
    quota = np.minimum(share * size, size - 1)
    wanted = np.floor(quota)
    total = np.rint(np.bincount(client, weights=quota))  # `bincount` adds a client's quotas one after the other
    extra = total - np.bincount(client, weights=wanted)
    largest = np.lexsort((ties, wanted - quota, client))
    wanted[largest] += _rank(client[largest]) < extra[client[largest]]
    return np.asarray(wanted, dtype=np.int64)


def _rank(groups: Array) -> Array:
    """The position of every element within its group; the groups are sorted."""
    sizes = np.bincount(groups)
    return np.asarray(np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes))
