"""Sort and partition: every client has a given number of labels (section IV-B of the paper)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import require
from fedadc.partitions.base import Partition


@dataclass(frozen=True, kw_only=True)
class SortAndPartition(Partition):
    """Sort by label, cut into blocks, give each client blocks of labels_per_client different labels (section IV-B).

    Every client has exactly that many labels; blocks of one class differ by at most one sample. The number of blocks
    of a class is proportional to its size, so clients have nearly equal sizes even if classes do not.
    """

    needs_classes: ClassVar[bool] = True

    labels_per_client: int = 2  # s

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.labels_per_client >= 1, f"labels_per_client must be at least 1, not {self.labels_per_client}.")

    def owners(self, labels: Array, classes: int, clients: int, rng: np.random.Generator) -> Array:
        s = self.labels_per_client
        sizes = np.bincount(labels, minlength=classes)
        present = np.flatnonzero(sizes)
        require(s <= len(present), f"labels_per_client is {s}, but the data has only {len(present)} classes.")
        require(
            clients * s >= len(present),
            f"{clients} clients × {s} labels make {clients * s} blocks, fewer than the {len(present)} classes, so some "
            "class would have no client; raise clients or labels_per_client.",
        )
        blocks = _blocks_per_class(clients * s, sizes[present], np.minimum(clients, sizes[present]))
        table = _assign_blocks(blocks, clients, s, rng)  # [clients, s]: a block's class, as an index into `present`

        # Number the blocks of each class in the order of the table, then cut each class into its blocks.
        by_class = np.argsort(table, axis=None, kind="stable")
        client_of_block = np.repeat(np.arange(clients), s)[by_class]
        first_block = np.cumsum(blocks) - blocks
        samples = rng.permutation(len(labels))
        samples = samples[np.argsort(labels[samples], kind="stable")]
        rank = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # a sample's rank in its class
        class_of = np.repeat(np.arange(len(present)), sizes[present])
        block = first_block[class_of] + rank * blocks[class_of] // sizes[present][class_of]
        owner = np.empty(len(labels), dtype=np.int64)
        owner[samples] = client_of_block[block]
        return owner


def _blocks_per_class(blocks: int, sizes: Array, limits: Array) -> Array:
    """The number of blocks of each class: in proportion to its size, from 1 to its limit, `blocks` in total."""
    require(
        int(limits.sum()) >= blocks,
        f"the data cannot be cut into {blocks} blocks, because a class has at most one block per client and a block at "
        "least one sample; use fewer clients or labels per client.",
    )
    shares = np.clip(np.floor(blocks * sizes / sizes.sum()).astype(np.int64), 1, limits)
    while (missing := blocks - int(shares.sum())) != 0:
        step = int(np.sign(missing))
        free = np.flatnonzero(shares < limits if step > 0 else shares > 1)  # classes whose number may change
        if abs(missing) >= len(free):
            shares[free] += step * (abs(missing) // len(free))
            shares = np.clip(shares, 1, limits)
        else:  # add to classes with the largest blocks; remove where blocks are smallest with one block less
            order = np.argsort(-step * sizes[free] / (shares[free] - (step < 0)), kind="stable")
            shares[free[order[: abs(missing)]]] += step
    return np.asarray(shares)


def _assign_blocks(blocks: Array, clients: int, s: int, rng: np.random.Generator) -> Array:
    """A random table [clients, s] in which class c appears blocks[c] times and no row has a class twice.

    The blocks in class order, assigned to the clients in turn, form such a table, because no class has more blocks than
    there are clients. Then random pairs of clients swap a block if neither row gets a class twice. These swaps are
    a symmetric Markov chain that can reach every table, so its limit distribution is uniform.
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
