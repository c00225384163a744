"""Downlinks: three ways to send the server's vectors to clients (section II-A of the paper).

- `pull`: every client of a cohort receives theta and the method's server vectors.
- `broadcast`: every client of the federation receives the mean of each round's uploads and repeats the server's update.
  So it always has theta and m.
- `overlap`: the next cohort receives theta and m while the current one computes. Then it receives only the mean, and
  repeats the update.

Training gives the same bits with all of them. The state of a downlink between rounds is a few tensors, called `links`,
which are saved with the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedadc.communication.clock import Devices
from fedadc.communication.ledger import Bytes, times, total
from fedadc.data.dataset import Array
from fedadc.errors import require, require_new_names, undefined
from fedadc.fields.settings import Settings
from fedadc.models.vectors import State
from fedadc.rng import generator


@dataclass(frozen=True)
class DownlinkRound:
    """What a downlink knows about a round."""

    round: int
    clients: int  # N
    seed: int
    cohort: Array
    dropped: Array  # clients of the cohort that received everything but did not report
    previous_cohort: Array
    next_cohort: Array
    full: Bytes  # theta and the server's vectors that clients need
    mean_bytes: int  # of the mean of this round's uploads; 0 if no upload is counted
    devices: Devices | None  # None without a clock
    now: float  # virtual time at the start of the round, in seconds
    last_duration: float  # virtual seconds that the previous round took

    def state_bytes(self, round: int) -> Bytes:
        """What a client must receive to have the state at the start of a round.

        In round 1, theta is enough: clients can initialize the server's vectors from it.
        """
        return self.full if round > 1 else {"theta": self.full["theta"]}

    def receiving(self, clients: Array, size: Array | int) -> Array:
        """Seconds until each client has received `size` bytes; 0 without a clock."""
        return np.zeros(len(clients)) if self.devices is None else self.devices.receiving(clients, size)


@dataclass(frozen=True)
class Delivery:
    """What was sent to a cohort, and when it arrived."""

    down: Bytes  # to this cohort
    wait: Array  # seconds from the start of the round until each client of the cohort can compute
    ahead: Bytes  # to the next cohort, while this one computes


@dataclass(frozen=True, kw_only=True)
class Downlink(Settings):
    """Base class of all downlinks. Subclasses implement `deliver`, and `after` if they keep links between rounds."""

    tracks: ClassVar[bool] = True  # True if clients repeat the server's update
    needs_neighboring_cohorts: ClassVar[bool] = False  # True if it uses the previous and the next cohort

    def __init_subclass__(cls) -> None:
        require_new_names(cls, "Downlink", {"looks_around": "needs_neighboring_cohorts"})  # an attribute of 0.1

    def start(self, clients: int) -> State:
        """The links before the first round."""
        return {}

    def deliver(self, info: DownlinkRound, links: State) -> Delivery:
        """What is sent during a round."""
        raise undefined(self, "deliver(info, links)")

    def after(self, info: DownlinkRound, delivery: Delivery, links: State, now: float) -> tuple[Bytes, State]:
        """What is sent when the round has ended, at the virtual time `now`, and the new links."""
        return {}, {}


@dataclass(frozen=True, kw_only=True)
class Pull(Downlink):
    """Every client of a cohort receives theta and the server's vectors."""

    tracks: ClassVar[bool] = False

    def deliver(self, info: DownlinkRound, links: State) -> Delivery:
        wait = info.receiving(info.cohort, sum(info.full.values()))
        return Delivery(times(len(info.cohort), info.full), wait, {})


@dataclass(frozen=True, kw_only=True)
class Overlap(Downlink):
    """The next cohort receives theta and the server's vectors in advance, then only the mean.

    A client that is selected in two consecutive rounds already has them. A client that was dropped in the previous
    round has nothing and receives everything, as with `pull`.
    """

    needs_neighboring_cohorts: ClassVar[bool] = True

    def start(self, clients: int) -> State:
        return {
            "mean": torch.tensor(0),  # bytes of the last round's mean
            "lost": torch.zeros(0, dtype=torch.int64),  # clients that were dropped in the last round
        }

    def deliver(self, info: DownlinkRound, links: State) -> Delivery:
        cohort, full = info.cohort, sum(info.full.values())
        ahead = times(int((~np.isin(info.next_cohort, cohort)).sum()), info.state_bytes(info.round))
        if info.round == 1:
            first = info.state_bytes(1)
            return Delivery(times(len(cohort), first), info.receiving(cohort, sum(first.values())), ahead)
        mean, lost = int(links["mean"]), np.isin(cohort, links["lost"].numpy())
        is_new = ~np.isin(cohort, info.previous_cohort)  # these clients received the previous state in advance
        sent = np.where(is_new, sum(info.state_bytes(info.round - 1).values()), 0)
        late = np.maximum(info.receiving(cohort, sent) - info.last_duration, 0)
        wait = np.where(lost, info.receiving(cohort, full), late + info.receiving(cohort, mean))
        down = total([times(int((~lost).sum()), {"mean": mean}), times(int(lost.sum()), info.full)])
        return Delivery(down, wait, ahead)

    def after(self, info: DownlinkRound, delivery: Delivery, links: State, now: float) -> tuple[Bytes, State]:
        return {}, {"mean": torch.tensor(info.mean_bytes), "lost": torch.from_numpy(info.dropped)}


@dataclass(frozen=True, kw_only=True)
class Broadcast(Downlink):
    """Every client receives theta once at the start, then the mean of every round.

    A client that was absent or dropped catches up when it is back, at the latest when it is selected. It receives the
    means that it missed, or theta and the server's vectors if these are smaller.
    """

    absent: float = 0.0  # the share of clients that miss a round's mean

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.absent <= 1, f"absent must be a share of the clients in [0, 1], not {self.absent}.")

    def start(self, clients: int) -> State:
        return {
            "total": torch.tensor(0),  # bytes of all means so far
            "heard": torch.zeros(clients, dtype=torch.int64),  # bytes of these means that each client has received
            "free": torch.zeros(clients, dtype=torch.float64),  # virtual time at which each client's link is idle
        }

    def deliver(self, info: DownlinkRound, links: State) -> Delivery:
        cohort = info.cohort
        if info.round == 1:
            first = info.state_bytes(1)
            return Delivery(times(info.clients, first), info.receiving(cohort, sum(first.values())), {})
        due = self._catch_up_bytes(info, int(links["total"]) - links["heard"].numpy()[cohort])
        busy = np.maximum(links["free"].numpy()[cohort] - info.now, 0)
        return Delivery(times(1, {"catch up": int(due.sum())}), busy + info.receiving(cohort, due), {})

    def after(self, info: DownlinkRound, delivery: Delivery, links: State, now: float) -> tuple[Bytes, State]:
        before, heard = int(links["total"]), links["heard"].numpy().copy()
        free = self._idle_times(info, delivery, links)
        heard[info.cohort] = before  # the cohort has caught up in `deliver`
        present = np.ones(info.clients, dtype=bool)
        if self.absent:
            present = generator(info.seed, "absent", info.round).random(info.clients) >= self.absent
        present[info.dropped] = False
        due = np.where(present, self._catch_up_bytes(info, before + info.mean_bytes - heard), 0)
        behind = heard < before
        if info.devices is not None:
            free = np.maximum(free, now) + info.receiving(np.arange(info.clients), due)
        heard[present] = before + info.mean_bytes
        down = {"mean": int(due[~behind].sum()), "catch up": int(due[behind].sum())}
        after = {"heard": torch.from_numpy(heard), "free": torch.from_numpy(free)}
        return times(1, down), {"total": torch.tensor(before + info.mean_bytes), **after}

    def _idle_times(self, info: DownlinkRound, delivery: Delivery, links: State) -> Array:
        """The virtual time at which each link has finished everything sent before the end of the round."""
        free = links["free"].numpy().copy()
        if info.round == 1:
            return np.asarray(free + info.receiving(np.arange(info.clients), sum(info.state_bytes(1).values())))
        free[info.cohort] = info.now + delivery.wait
        return free

    def _catch_up_bytes(self, info: DownlinkRound, missed: Array) -> Array:
        """Bytes that bring each client up to date: the means that it missed, or the full state if that is less."""
        return np.asarray(np.minimum(missed, sum(info.full.values())))


DOWNLINKS: dict[str, type[Downlink]] = {"pull": Pull, "broadcast": Broadcast, "overlap": Overlap}
