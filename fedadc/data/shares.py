"""Each client's own share of held-out samples.

Samples that name their client are its own. Others go by the labels of training shares: the samples of a class are dealt
in proportion to how many of it each client trains on. What a Dirichlet client drew, it draws here too; a
sort-and-partition client gets its own labels. Shares are disjoint, and together all samples of classes that somebody
holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedadc.data.dataset import Array, Clients
from fedadc.errors import require


def local_shares(labels: Array, counts: Array, rng: np.random.Generator) -> Clients:
    """Who gets which of the samples with these labels; `counts` [clients, classes] is what each client trains on."""
    clients, classes = counts.shape
    require(len(labels) == 0 or labels.max() < classes, f"a label is outside 0..{classes - 1}.")
    owner = np.full(len(labels), clients, dtype=np.int64)  # nobody
    samples = rng.permutation(len(labels))
    samples = samples[np.argsort(labels[samples], kind="stable")]
    ends = np.cumsum(np.bincount(labels, minlength=classes))
    for c, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        members, share = samples[start:end], np.cumsum(counts[:, c])
        if share[-1]:
            cuts = np.rint(share / share[-1] * len(members))
            owner[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
    held = Clients.from_owner(owner, clients + 1)
    return Clients(held.indices[: held.offsets[clients]], held.offsets[:-1])


def shares_by_name(owners: Array, names: Sequence[str]) -> Clients:
    """Each client's samples by the client ids of all samples, those of strangers left out."""
    number = {name: k for k, name in enumerate(names)}
    ids, position = np.unique(owners, return_inverse=True)
    known = np.array([number.get(str(i), len(names)) for i in ids], dtype=np.int64)
    held = Clients.from_owner(known[position.reshape(-1)], len(names) + 1)
    return Clients(held.indices[: held.offsets[len(names)]], held.offsets[:-1])
