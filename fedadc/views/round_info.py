"""The server's view of the round that its clients have just trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundInfo:
    """What the server knows about the round when it updates the model."""

    round: int  # t, from 1
    lr: float  # η_t, the learning rate that the clients used
    counted: int  # |S_t|, the number of uploads in the mean
    clients: int  # N, the number of all clients
