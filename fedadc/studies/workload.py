"""What the clients and the links of a run have to do, round by round, found without training.

Cohorts, faults and bytes depend on the settings and the seed alone, so they can be played through in advance.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from fedadc.communication.ledger import Bytes
from fedadc.data.dataset import Array
from fedadc.models.vectors import State
from fedadc.training.coordinator import Coordinator

MOST_PLAYED = 2000  # rounds; further rounds are counted like these on average


@dataclass(frozen=True)
class Message:
    """What one client sends, and the mean of what all send; its tensors have shapes but no content."""

    sent: Bytes
    mean: State

    @staticmethod
    def like(sent: Bytes, mean: State) -> Message:
        return Message(sent, {name: torch.empty_like(vector, device="meta") for name, vector in mean.items()})


@dataclass(frozen=True)
class Workload:
    """Sums over the first 1, 2, ... rounds of a run, by name.

    `visits` are clients that train in a round, `touched` the samples that a frozen teacher sees once. `first_` are
    those of clients that have no state yet. `known` is the number of clients that have one.
    """

    sums: dict[str, Array]
    seconds: float  # of the server per round, for all that is played here

    def total(self, name: str, rounds: int) -> int:
        """The sum over the rounds of a run."""
        sums = self.sums[name]
        if rounds <= len(sums) or name == "known" or name.startswith("first_"):
            return int(sums[min(rounds, len(sums)) - 1])
        return int(sums[-1]) * rounds // len(sums)


def play(coordinator: Coordinator, message: Message, rounds: int) -> Workload:
    """Play through the rounds of a run: who trains, on how much, and what is sent."""
    known, links = np.zeros(len(coordinator.roster), dtype=bool), coordinator.network.start()
    played: list[Counter[str]] = []
    began = time.process_time()
    for t in range(1, min(rounds, MOST_PLAYED) + 1):
        chosen = coordinator.select(t)
        work, sizes = coordinator.agreement.work, coordinator.roster.sizes[chosen]
        dropped, _, steps = coordinator.faults.draw(chosen, work.count_steps(sizes), coordinator.agreement.seed, t)
        clients, sizes, steps = chosen[~dropped], sizes[~dropped], steps[~dropped]
        reporting = dict(zip(clients.tolist(), steps.tolist(), strict=True))
        sent = dict.fromkeys(reporting, message.sent)
        mean = message.mean if reporting else None
        ledger, links = coordinator.network.carry(t, chosen, reporting, sent, mean, links)
        counted = _counted(coordinator, sizes, steps)
        first = _counted(coordinator, sizes[~known[clients]], steps[~known[clients]])
        counted.update({f"first_{name}": value for name, value in first.items()})
        known[clients] = True
        counted.update(bytes_up=ledger.bytes_up, bytes_down=ledger.bytes_down, known=first["visits"])
        played.append(counted)
    seconds = (time.process_time() - began) / len(played)
    sums = {name: np.cumsum(np.array([c[name] for c in played], dtype=np.int64)) for name in played[0]}
    return Workload(sums, seconds)


def _counted(coordinator: Coordinator, sizes: Array, steps: Array) -> Counter[str]:
    """The work of clients of these sizes in these steps."""
    work = coordinator.agreement.work
    each = steps * work.batch_size  # if less than the client has, no sample is used twice
    return Counter(
        visits=len(sizes),
        steps=int(steps.sum()),
        samples=work.count_samples(sizes, steps),
        touched=int(np.minimum(each, sizes).sum()),
    )
