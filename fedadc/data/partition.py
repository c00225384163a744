"""How samples are dealt out to clients. Each rule gives every sample one owner: clients are disjoint and complete.

A rule is a frozen dataclass; `owners(labels, classes, clients, rng)` returns an int64 vector of client numbers.
Everything is vectorised: a million clients take seconds.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedadc.data.dataset import Array, Clients, Dataset
from fedadc.errors import FedadcError, require, undefined
from fedadc.rng import generator


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Base of all partitions; subclass it and write `owners`."""

    needs_clients: ClassVar[bool] = True  # False: the rule itself says how many clients there are

    def owners(self, labels: Array, classes: int, clients: int, rng: np.random.Generator) -> Array:
        raise undefined(self, "owners(labels, classes, clients, rng)")


@dataclass(frozen=True, kw_only=True)
class IID(Partition):
    """Random shares of equal size (to one sample)."""

    def owners(self, labels: Array, classes: int, clients: int, rng: np.random.Generator) -> Array:
        return rng.permutation(np.arange(len(labels)) % clients)


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


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """One Dir(alpha) vector per client over the classes (section IV-C); the smaller alpha, the more skewed.

    Columns are normalised over clients and cumulative shares rounded; sizes differ. An empty client takes one
    sample from the largest (docs/deviations.md, 6).
    """

    alpha: float = 0.5

    def owners(self, labels: Array, classes: int, clients: int, rng: np.random.Generator) -> Array:
        require(0 < self.alpha < math.inf, f"alpha must be positive and finite, not {self.alpha}.")
        draws = rng.standard_gamma(self.alpha, size=(clients, classes))
        lost = draws.sum(axis=1) == 0  # a tiny alpha underflows; its limit is all weight on one class
        draws[lost, rng.integers(classes, size=int(lost.sum()))] = 1
        draws /= draws.sum(axis=1, keepdims=True)
        draws[:, draws.sum(axis=0) == 0] = 1  # a class that nobody drew is spread evenly
        owner = np.empty(len(labels), dtype=np.int64)
        samples = rng.permutation(len(labels))
        samples = samples[np.argsort(labels[samples], kind="stable")]
        ends = np.cumsum(np.bincount(labels, minlength=classes))
        for c, end in enumerate(ends):
            members = samples[(ends[c - 1] if c else 0) : end]
            share = np.cumsum(draws[:, c])
            cuts = np.rint(share / share[-1] * len(members)).astype(np.int64)
            owner[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
        return _fill_empty(owner, clients)


@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """The clients that the data itself names (a client column, client ids, a list of client arrays)."""

    needs_clients: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Pooled(Partition):
    """One client that holds everything: centralised training, the upper bound."""

    needs_clients: ClassVar[bool] = False

    def owners(self, labels: Array, classes: int, clients: int, rng: np.random.Generator) -> Array:
        return np.zeros(len(labels), dtype=np.int64)


PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "sort": SortAndPartition,
    "dirichlet": Dirichlet,
    "natural": Natural,
    "pooled": Pooled,
}


def partition(
    rule: Partition,
    labels: Array,
    classes: int,
    clients: int | None,
    rng: np.random.Generator,
    given: Array | None = None,
) -> Clients:
    """Deal out samples by a rule; `given` are the client ids of a natural federation."""
    if isinstance(rule, Natural):
        if given is None:
            raise FedadcError(
                "partition natural needs client ids: a client column in a CSV, `client` in an npz, or client arrays."
            )
        ids, owner = np.unique(given, return_inverse=True)
        require(
            clients in (None, len(ids)),
            f"data.clients is {clients}, but the data names {len(ids)} clients; leave it out.",
        )
        return Clients.from_owner(owner, len(ids))
    if not rule.needs_clients:
        require(clients in (None, 1), f"partition pooled has one client; data.clients is {clients}.")
        clients = 1
    if clients is None:
        raise FedadcError("data.clients is missing: say how many clients the data is dealt to.")
    require(clients >= 1, f"data.clients must be at least 1, not {clients}.")
    require(
        clients <= len(labels), f"{clients} clients cannot each hold a sample: there are only {len(labels)} samples."
    )
    owner = rule.owners(labels, classes, clients, rng)
    return Clients.from_owner(owner, clients)


def deal(data: Dataset, rule: Partition | None, clients: int | None, seed: int) -> Clients:
    """The clients of a data set's training part."""
    rng = generator(seed, "partition")
    return partition(rule or usual(data, clients), data.train.y.numpy(), len(data.classes), clients, rng, data.owners)


def usual(data: Dataset, clients: int | None) -> Partition:
    """The rule where none is given: the clients that the data names, else even shares."""
    return Natural() if data.owners is not None and clients is None else IID()


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


def _fill_empty(owner: Array, clients: int) -> Array:
    """Give every empty client one sample of the client that is largest at that moment."""
    sizes = np.bincount(owner, minlength=clients)
    empty = np.flatnonzero(sizes == 0)
    if len(empty) == 0:
        return owner
    heap = [(-int(size), k) for k, size in enumerate(sizes) if size > 1]
    heapq.heapify(heap)
    donors = np.empty(len(empty), dtype=np.int64)
    for position in range(len(empty)):
        negative, donor = heap[0]
        heapq.heapreplace(heap, (negative + 1, donor))
        donors[position] = donor
    held = Clients.from_owner(owner, clients)
    order = np.argsort(donors, kind="stable")
    nth = np.arange(len(donors)) - np.searchsorted(donors[order], donors[order])  # of a donor's gifts
    owner[held.indices[held.offsets[donors[order]] + nth]] = empty[order]
    return owner
