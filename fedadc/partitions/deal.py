"""The clients of a data set, by a partition."""

from __future__ import annotations

import numpy as np

from fedadc.data.dataset import Array, Clients, Dataset
from fedadc.errors import FedadcError, require
from fedadc.partitions.base import Partition
from fedadc.partitions.iid import IID
from fedadc.partitions.natural import Natural
from fedadc.rng import generator


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
    return partition(
        rule or default_partition(data, clients), data.train.y.numpy(), len(data.classes), clients, rng, data.owners
    )


def default_partition(data: Dataset, clients: int | None) -> Partition:
    """The rule where none is given: the clients that the data names, else even shares."""
    return Natural() if data.owners is not None and clients is None else IID()
