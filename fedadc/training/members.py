"""Who the clients of every round are, and whose uploads do not count.

In a simulation these are all clients and none. In a real federation sites join, are absent, and are late; a trace of it
(`trace.py`) lets a simulation repeat what happened. A client that joins gets the next number. Numbers are never given
again: a client that has left keeps its number, and its part in means over all clients (SCAFFOLD's c, FedDyn's h).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from fedadc.data.dataset import Array


class Members:
    """All clients take part in every round."""

    fixed = True  # the same clients are present in every round

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def count(self, round: int) -> int:
        """N: how many clients have joined until this round. They have the numbers from 0 to N - 1."""
        return self.clients

    def present(self, round: int) -> Array:
        """The numbers of those that can be chosen for a round, in ascending order."""
        return np.arange(self.count(round))

    def joined(self, round: int) -> tuple[int, ...]:
        """Those that have joined since the round before; in the first round, none."""
        return tuple(range(self.count(max(1, round - 1)), self.count(round)))

    def absent(self, round: int) -> tuple[int, ...]:
        """Those that have joined, but cannot be chosen."""
        if self.fixed:
            return ()
        everyone = np.arange(self.count(round))
        return tuple(everyone[~np.isin(everyone, self.present(round))].tolist())

    def dropped(self, round: int) -> Collection[int]:
        """Clients that are known to have not reported in time, or whose uploads were refused."""
        return ()

    def skipped(self, round: int) -> Collection[int]:
        """Clients whose updates are known to have been not finite."""
        return ()
