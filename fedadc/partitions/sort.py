"""Sort and partition: every client holds a given number of labels (section IV-B of the paper)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import require
from fedadc.partitions.base import Partition


@dataclass(frozen=True, kw_only=True)
class SortAndPartition(Partition):
    """Sort by label, cut into blocks, deal s blocks of different labels to each client (section IV-B).

    Every client holds exactly s different labels; blocks of one class differ by at most one sample. A class has
    blocks in proportion to its size, so that clients are of nearly equal size even where classes are not.
    """

    labels_per_client: int = 2  # s

    def owners(self, labels: Array, classes: int, clients: int, rng: np.random.Generator) -> Array:
        s = self.labels_per_client
        sizes = np.bincount(labels, minlength=classes)
        present = np.flatnonzero(sizes)
        require(s >= 1, f"labels_per_client must be at least 1, not {s}.")
        require(s <= len(present), f"labels_per_client is {s}, but the data has only {len(present)} classes.")
        require(
            clients * s >= len(present),
            f"{clients} clients × {s} labels make {clients * s} blocks, fewer than the {len(present)} classes: some "
            "class would have no client; raise data.clients or labels_per_client.",
        )
        blocks = _share_out(clients * s, sizes[present], np.minimum(clients, sizes[present]))
        table = _deal(blocks, clients, s, rng)  # [clients, s], the class (among the present ones) of each block

        # Number the blocks of each class in the order of the table, then cut each class into its blocks.
        by_class = np.argsort(table, axis=None, kind="stable")
        client_of_block = np.repeat(np.arange(clients), s)[by_class]
        first_block = np.cumsum(blocks) - blocks
        samples = rng.permutation(len(labels))
        samples = samples[np.argsort(labels[samples], kind="stable")]
        rank = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of a sample in its class
        which = np.repeat(np.arange(len(present)), sizes[present])
        block = first_block[which] + rank * blocks[which] // sizes[present][which]
        owner = np.empty(len(labels), dtype=np.int64)
        owner[samples] = client_of_block[block]
        return owner


def _share_out(blocks: int, sizes: Array, limits: Array) -> Array:
    """Blocks per class in proportion to its size, at least 1 and at most its limit each, summing to `blocks`."""
    require(
        int(limits.sum()) >= blocks,
        f"{blocks} blocks of different labels cannot be cut: a class gives at most one block to a client and one "
        "sample to a block; use fewer clients or labels per client.",
    )
    shares = np.clip(np.floor(blocks * sizes / sizes.sum()).astype(np.int64), 1, limits)
    while (missing := blocks - int(shares.sum())) != 0:
        step = int(np.sign(missing))
        room = np.flatnonzero(shares < limits if step > 0 else shares > 1)
        if abs(missing) >= len(room):
            shares[room] += step * (abs(missing) // len(room))
            shares = np.clip(shares, 1, limits)
        else:  # the last few: to the classes with the largest blocks, from those that stay smallest with one less
            order = np.argsort(-step * sizes[room] / (shares[room] - (step < 0)), kind="stable")
            shares[room[order[: abs(missing)]]] += step
    return np.asarray(shares)


def _deal(blocks: Array, clients: int, s: int, rng: np.random.Generator) -> Array:
    """A random table [clients, s] in which class c stands blocks[c] times and no row holds a class twice.

    Blocks in class order, dealt row by row, never meet their own class (no class has more blocks than there are
    clients). From there random pairs of clients swap a block where both rows stay without repetition: a symmetric
    chain that reaches every table, so its limit is uniform.
    """
    order = rng.permutation(len(blocks)).astype(np.int32)
    table = np.repeat(order, blocks[order]).reshape(s, clients).T.copy()
    pairs = clients // 2
    for _ in range(8 + 2 * math.ceil(math.log2(clients * s + 1)) if pairs else 0):
        shuffled = rng.permutation(clients)
        left, right = shuffled[:pairs], shuffled[pairs : 2 * pairs]
        i, j = rng.integers(s, size=(2, pairs))
        a, b = table[left, i], table[right, j]
        fits = ~((table[left] == b[:, None]).any(axis=1) | (table[right] == a[:, None]).any(axis=1))
        table[left[fits], i[fits]], table[right[fits], j[fits]] = b[fits], a[fits]
    return table
