"""The server's view of the round that was just trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundInfo:
    """What the server knows when it updates: the round just trained."""

    round: int  # t, from 1
    lr: float  # η_t, the learning rate the clients used in it
    counted: int  # |S_t|, the uploads in the mean
    clients: int  # N
