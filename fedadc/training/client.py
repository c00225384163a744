"""The client's half of a federation: one client, its own samples and its own state. Bytes come in, bytes go out."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace

from fedadc.data.dataset import Samples
from fedadc.errors import require
from fedadc.fields.summary import summary
from fedadc.models.vectors import State
from fedadc.system.determinism import deterministic
from fedadc.training.agreement import Agreement
from fedadc.training.local import local_update
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.wire import Wire


@dataclass
class Client:
    """One client. It knows the agreement and what it receives, and has nothing of any other client.

    It keeps its state after every round in which it took part, until it is told to `forget`. So it can answer again
    where an answer was lost, and follow a server that goes back to an earlier round.
    """

    agreement: Agreement
    number: int  # in the server's roster
    samples: Samples
    states: MutableMapping[int, State] = field(default_factory=dict)  # by round; the server says which counted last
    tells_loss: bool = True  # whether the server learns its training loss

    def __post_init__(self) -> None:
        self._wire = Wire(self.agreement)

    def __repr__(self) -> str:
        return summary("Client", {"number": self.number, "samples": len(self.samples), "states": list(self.states)})

    def answer(self, message: bytes) -> bytes:
        """Do a task: train, keep the new state, and return the upload."""
        return self.do(*self._wire.read_task(message))

    def do(self, broadcast: ServerBroadcast, task: ClientTask) -> bytes:
        """Do a task whose message is read already."""
        require(task.client == self.number, f"the task is for client {task.client}; this is client {self.number}.")
        counted = task.counted
        require(counted == 0 or counted in self.states, f"client {self.number} has no state of round {counted}.")
        state = self.states.get(counted)
        for round in [round for round in self.states if counted < round < broadcast.round]:  # they did not count
            del self.states[round]
        with deterministic():
            result = local_update(self.agreement, self.agreement.client_data(self.samples), state, broadcast, task)
        keeps_state = bool(result.state) or state is not None
        if keeps_state:
            self.states[broadcast.round] = {name: v.cpu() for name, v in result.state.items()}
        told = result if self.tells_loss else replace(result, loss=math.nan)
        return self._wire.write_result(broadcast.round, told, keeps_state)

    def forget(self, before: int) -> None:
        """Delete the states of rounds that no server will go back to, so that they do not pile up.

        States of rounds that did not count are gone already, but for the newest.
        """
        for round in [round for round in self.states if round < before]:
            del self.states[round]
