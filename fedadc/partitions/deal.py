"""Apply a partition to a data set: which client has which samples."""

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
    client_ids: Array | None = None,
) -> Clients:
    """Assign samples to clients by a rule; `client_ids` has the client of every sample if the data names clients."""
    if isinstance(rule, Natural):
        if client_ids is None:
            raise FedadcError(
                "partition natural needs client ids: a client column in a CSV, `client` in an npz, or client arrays."
            )
        ids, owner = np.unique(client_ids, return_inverse=True)
        require(
            clients in (None, len(ids)),
            f"clients is {clients}, but the data names {len(ids)} clients; remove clients, or set a partition that "
            "deals the samples anew.",
        )
        return Clients.from_owner(owner, len(ids))
    if not rule.needs_clients:
        require(clients in (None, 1), f"clients is {clients}, but the partition pooled has one client; remove it.")
        clients = 1
    if clients is None:
        raise FedadcError("clients is missing: set the number of clients among which the data is divided.")
    require(clients >= 1, f"clients must be at least 1, not {clients}.")
    require(
        clients <= len(labels),
        f"{clients} clients need at least one sample each, but there are only {len(labels)} samples.",
    )
    owner = rule.owners(labels, classes, clients, rng)
    return Clients.from_owner(owner, clients)


def deal(data: Dataset, rule: Partition | None, clients: int | None, seed: int) -> Clients:
    """The clients of a data set: its training samples, assigned by a rule or by the default partition."""
    rng = generator(seed, "partition")
    rule = rule or default_partition(data)
    require(
        not rule.needs_classes or bool(data.classes),
        f"partition {type(rule).__name__.lower()} deals by class, but the labels are numbers (task: {data.task.name}); "
        "use iid, natural or pooled.",
    )
    return partition(rule, data.train.y.numpy(), len(data.classes), clients, rng, data.owners)


def default_partition(data: Dataset) -> Partition:
    """The partition if none is configured: the clients that the data names, else equal random shares."""
    return IID() if data.owners is None else Natural()
