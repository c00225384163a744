"""Who takes part in every round of a federation whose sites may join and leave between rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import WorkersLost
from fedadc.sites.connections import LOOK_AGAIN, SiteConnections
from fedadc.sites.status import JOIN, Activity
from fedadc.training.members import Members


class SiteMembers(Members):
    """Those that are connected and not busy with an earlier round when a round begins."""

    fixed = False

    def __init__(
        self,
        connections: SiteConnections,
        admit: Callable[[], None],  # lets new sites join
        names: Callable[[], Sequence[str]],  # of all sites that have joined, by number
        before: Callable[[], tuple[int, int]],  # the last round, and how many clients had joined
    ) -> None:
        super().__init__(len(names()))
        self.connections, self._admit, self._names, self._before = connections, admit, names, before
        self._counts, self._present = dict[int, int](), dict[int, Array]()

    def _begin(self) -> None:
        """Called when a round is asked for: only then it is known from which one the run goes on."""
        if not self._counts:
            self._counts = dict([self._before()])

    def count(self, round: int) -> int:
        self._begin()
        if round not in self._counts:
            self._settle(round)
        return self._counts[round]

    def present(self, round: int) -> Array:
        self._begin()
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
            self.connections.journal.activity(Activity(JOIN, 1, 0, (), tuple(sorted(self.connections.found))))
            if time.monotonic() > until:
                raise WorkersLost(f"round {round}: no site is connected for {self.connections.patience:g} seconds.")
            time.sleep(LOOK_AGAIN)
