"""The client's half of a federation: one client, its own samples and its own state. Bytes come in, bytes go out."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedadc.data.dataset import Samples
from fedadc.errors import require
from fedadc.models.vectors import State
from fedadc.system.determinism import deterministic
from fedadc.training.agreement import Agreement
from fedadc.training.local import local_update
from fedadc.training.wire import Wire


@dataclass
class Client:
    """One client. It knows the agreement and what it receives, and has nothing of any other client."""

    agreement: Agreement
    number: int  # in the server's roster
    samples: Samples
    states: dict[int, State] = field(default_factory=dict)  # by round: the last one counted, and those not known to be

    def __post_init__(self) -> None:
        self._wire = Wire(self.agreement)

    def __call__(self, content: bytes) -> bytes:
        """Answer a task: train, keep the new state, and return the upload."""
        broadcast, task = self._wire.read_task(content)
        require(task.client == self.number, f"the task is for client {task.client}; this is client {self.number}.")
        state = self._counted_state(task.counted)
        with deterministic():
            result = local_update(self.agreement, self.agreement.client_data(self.samples), state, broadcast, task)
        keeps_state = bool(result.state) or state is not None
        if keeps_state:
            self.states[broadcast.round] = {name: v.cpu() for name, v in result.state.items()}
        return self._wire.write_result(broadcast.round, result, keeps_state)

    def _counted_state(self, round: int) -> State | None:
        """The state after the last round that the server counted; later ones are forgotten: their uploads were lost."""
        require(round == 0 or round in self.states, f"client {self.number} has no state of round {round}.")
        self.states = {round: self.states[round]} if round else {}
        return self.states.get(round)
