"""Who takes part in every round of a federation whose sites may join and leave between rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import WorkersLost
from fedadc.sites.connections import LOOK_AGAIN, SiteConnections
from fedadc.training.members import Members


class SiteMembers(Members):
    """Those that are connected and not busy with an earlier round when a round begins."""

    fixed = False

    def __init__(
        self,
        connections: SiteConnections,
        admit: Callable[[], None],  # lets new sites join
        names: Callable[[], Sequence[str]],  # of all sites that have joined, by number
        before: tuple[int, int],  # a round that is over, and how many clients had joined until then
    ) -> None:
        super().__init__(before[1])
        self.connections, self._admit, self._names = connections, admit, names
        self._counts, self._present = dict([before]), dict[int, Array]()

    def count(self, round: int) -> int:
        if round not in self._counts:
            self._settle(round)
        return self._counts[round]

    def present(self, round: int) -> Array:
        if round not in self._present:
            self._settle(round)
        return self._present[round]

    def _settle(self, round: int) -> None:
        """Wait until somebody is there, and keep who it is: a round asks for it more than once."""
        until = time.monotonic() + self.connections.patience
        while True:
            self.connections.look()
            if round > 1:
                self._admit()
            names = self._names()
            here = self.connections.found.keys() - self.connections.busy
            numbers = [number for number, name in enumerate(names) if name in here]
            if numbers:
                self.clients = self._counts[round] = len(names)
                self._present = {round: np.array(numbers)}
                return
            if time.monotonic() > until:
                raise WorkersLost(f"round {round}: no site is connected for {self.connections.patience:g} seconds.")
            time.sleep(LOOK_AGAIN)
