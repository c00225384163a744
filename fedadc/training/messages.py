"""What passes between the server and its clients in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedadc.communication.ledger import Bytes
from fedadc.models.vectors import State, Vector


@dataclass(frozen=True)
class ServerBroadcast:
    """What every client of a round receives."""

    round: int
    lr: float
    theta: Vector
    server: State  # the downlink vectors


@dataclass(frozen=True)
class ClientTask:
    """What one client of a round is asked to do."""

    client: int
    steps: int  # H, its own
    states: Mapping[int, State] = field(default_factory=dict)  # of all clients that have one
    weight: float = 1.0  # of its upload in the mean

    @property
    def state(self) -> State | None:
        """The client's state after its last counted round, read when it is needed; None if it has none yet."""
        return self.states.get(self.client)


@dataclass(frozen=True)
class ClientResult:
    """What a client returns. Only `upload` travels; `state` stays with the client."""

    client: int
    upload: State
    state: State
    loss: float  # mean over its steps
    sent: Bytes  # by name, as it traveled
    steps: int
    weight: float
    finite: bool = True  # upload and state are finite; if not, neither takes effect
