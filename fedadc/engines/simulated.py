"""All clients of a simulation: one process has the samples of every client, and plays each of them in turn."""

from __future__ import annotations

from dataclasses import dataclass

from fedadc.data.batches import ClientData
from fedadc.data.dataset import Clients, Samples
from fedadc.models.vectors import State
from fedadc.training.aggregate import PartialSum, received
from fedadc.training.agreement import Agreement
from fedadc.training.local import local_update
from fedadc.training.messages import ClientTask, ServerBroadcast


@dataclass(frozen=True)
class SimulatedClients:
    """Client k has the training samples at `clients[k]`."""

    agreement: Agreement
    samples: Samples
    clients: Clients

    def data(self, client: int) -> ClientData:
        return self.agreement.client_data(self.samples, self.clients[client])

    def train(self, broadcast: ServerBroadcast, task: ClientTask, state: State | None) -> PartialSum:
        """Train one client, and read its upload as the server does."""
        result = local_update(self.agreement, self.data(task.client), state, broadcast, task)
        return received(self.agreement, result, task.weight)
