"""The two loops: rounds at the server, steps at the clients; and what passes between them."""

from fedadc.training.agreement import Agreement
from fedadc.training.client import Client
from fedadc.training.client_states import Storage
from fedadc.training.coordinator import Coordinator
from fedadc.training.ensembles import EMA, SWA, Ensembles, Lookahead
from fedadc.training.faults import Faults
from fedadc.training.rounds import train
from fedadc.training.state import Round, RunState
from fedadc.training.wire import Wire

__all__ = [
    "EMA", "SWA", "Agreement", "Client", "Coordinator", "Ensembles", "Faults", "Lookahead", "Round", "RunState",
    "Storage", "Wire", "train",
]  # fmt: skip
