"""Local shares: the held-out samples on which each client's own model is evaluated.

Samples with a known owner go to that client. Otherwise the samples of a class are distributed in proportion to the
number of training samples of that class at each client. So the local share has the label distribution of the client's
training data, for example its Dirichlet proportions or the labels that sort-and-partition gave it. Shares are disjoint.
Together they contain every sample whose class occurs in some client's training data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedadc.data.dataset import Array, Clients
from fedadc.errors import require


def local_shares(labels: Array, counts: Array, rng: np.random.Generator) -> Clients:
    """Distribute the samples with these labels; `counts` [clients, classes] are the clients' training samples."""
    clients, classes = counts.shape
    require(len(labels) == 0 or labels.max() < classes, f"a label is outside 0..{classes - 1}.")
    owner = np.full(len(labels), clients, dtype=np.int64)  # `clients` means: no owner
    samples = rng.permutation(len(labels))
    samples = samples[np.argsort(labels[samples], kind="stable")]
    ends = np.cumsum(np.bincount(labels, minlength=classes))
    for c, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        members, cumulative = samples[start:end], np.cumsum(counts[:, c])
        if cumulative[-1]:
            cuts = np.rint(cumulative / cumulative[-1] * len(members))
            owner[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
    return _owned_shares(owner, clients)


def shares_by_name(owners: Array, names: Sequence[str]) -> Clients:
    """Each client's samples, from the client id of every sample. Samples of clients not in `names` are left out."""
    number = {name: k for k, name in enumerate(names)}
    ids, position = np.unique(owners, return_inverse=True)
    client_of_id = np.array([number.get(str(i), len(names)) for i in ids], dtype=np.int64)
    return _owned_shares(client_of_id[position.reshape(-1)], len(names))


def _owned_shares(owner: Array, clients: int) -> Clients:
    """Each client's samples. Samples whose owner is the number `clients` belong to no client."""
    shares = Clients.from_owner(owner, clients + 1)
    return Clients(shares.indices[: shares.offsets[clients]], shares.offsets[:-1])
