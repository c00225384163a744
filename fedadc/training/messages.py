"""What passes between the server and its clients in a round. `wire.py` turns these messages into bytes and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedadc.models.vectors import State, Vector


@dataclass(frozen=True)
class ServerBroadcast:
    """What every client of a round receives."""

    round: int
    lr: float
    theta: Vector
    server: State  # the downlink vectors
    mean_samples: float  # the mean number of training samples over all clients


@dataclass(frozen=True)
class ClientTask:
    """What one client of a round is asked to do."""

    client: int
    steps: int  # H, its own
    weight: float = 1.0  # of its upload in the mean; it stays at the server. 0: as if its update were not finite
    counted: int = 0  # the last round whose new state of this client took effect; 0: none


@dataclass(frozen=True)
class ClientResult:
    """What a client returns. `upload` is sent to the server; `state` stays with the client."""

    client: int
    upload: State  # as it is sent: encoded by the uplink
    state: State
    loss: float  # mean over its steps
    finite: bool = True  # the new state is finite; if not, neither state nor upload takes effect
    distance: float = math.nan  # of its local model from the global one; measured with `evaluate.drift` only
