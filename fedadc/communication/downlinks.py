"""Three ways to send the server's vectors to clients (section II-A of the paper). All train with the same bits.

`pull`: every client of a cohort receives theta and the method's server vectors. `broadcast`: every client of the
federation receives the mean of each round's uploads and repeats the server's own update, so it always has theta and m.
`overlap`: the next cohort receives theta and m while the present one computes, then only the mean, and repeats the
update. Where it stands between rounds is a few tensors (`links`), saved with a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedadc.communication.clock import Devices
from fedadc.communication.ledger import Bytes, times, total
from fedadc.data.dataset import Array
from fedadc.errors import require, undefined
from fedadc.models.vectors import State
from fedadc.rng import generator


@dataclass(frozen=True)
class DownlinkRound:
    """A round as the downlink sees it."""

    round: int
    clients: int  # N
    seed: int
    cohort: Array
    dropped: Array  # of them: they were sent what everybody was, and then nothing was heard of them
    before: Array  # the cohort of the round before
    next: Array  # the cohort of the next round
    full: Bytes  # of theta and the server's vectors that clients need
    mean: int  # bytes of the mean of this round's uploads; 0 if nobody's counted
    devices: Devices | None
    now: float  # virtual seconds at its beginning
    last: float  # that the round before took

    def held(self, round: int) -> Bytes:
        """What a client must receive to have all of a round; the server's first state everybody can make of theta."""
        return self.full if round > 1 else {"theta": self.full["theta"]}

    def receiving(self, clients: Array, size: Array | int) -> Array:
        return np.zeros(len(clients)) if self.devices is None else self.devices.receiving(clients, size)


@dataclass(frozen=True)
class Delivery:
    """What a round's cohort was sent."""

    down: Bytes
    wait: Array  # seconds from the round's beginning until each client of the cohort has what it needs
    ahead: Bytes


@dataclass(frozen=True, kw_only=True)
class Downlink:
    """Base of all downlinks."""

    tracks: ClassVar[bool] = True  # clients repeat the server's update
    looks_around: ClassVar[bool] = False  # it must know the cohorts of the rounds before and after

    def start(self, clients: int) -> State:
        """Where it stands before the first round."""
        return {}

    def deliver(self, trip: DownlinkRound, links: State) -> Delivery:
        raise undefined(self, "deliver(trip, links)")

    def after(self, trip: DownlinkRound, delivery: Delivery, links: State, now: float) -> tuple[Bytes, State]:
        """What is sent once the round has ended at a virtual time, and where it stands then."""
        return {}, {}


@dataclass(frozen=True, kw_only=True)
class Pull(Downlink):
    """Every client of a cohort receives theta and the server's vectors."""

    tracks: ClassVar[bool] = False

    def deliver(self, trip: DownlinkRound, links: State) -> Delivery:
        wait = trip.receiving(trip.cohort, sum(trip.full.values()))
        return Delivery(times(len(trip.cohort), trip.full), wait, {})


@dataclass(frozen=True, kw_only=True)
class Overlap(Downlink):
    """The next cohort receives theta and the server's vectors ahead, then only the mean.

    A client of two rounds in a row has them already; one that was dropped in between has nothing, and pulls.
    """

    looks_around: ClassVar[bool] = True

    def start(self, clients: int) -> State:
        return {"mean": torch.tensor(0), "lost": torch.zeros(0, dtype=torch.int64)}

    def deliver(self, trip: DownlinkRound, links: State) -> Delivery:
        cohort, full = trip.cohort, sum(trip.full.values())
        came = times(int((~np.isin(trip.next, cohort)).sum()), trip.held(trip.round))
        if trip.round == 1:
            first = trip.held(1)
            return Delivery(times(len(cohort), first), trip.receiving(cohort, sum(first.values())), came)
        mean, lost = int(links["mean"]), np.isin(cohort, links["lost"].numpy())
        ahead = ~np.isin(cohort, trip.before)
        sent = np.where(ahead, sum(trip.held(trip.round - 1).values()), 0)
        late = np.maximum(trip.receiving(cohort, sent) - trip.last, 0)
        wait = np.where(lost, trip.receiving(cohort, full), late + trip.receiving(cohort, mean))
        down = total([times(int((~lost).sum()), {"mean": mean}), times(int(lost.sum()), trip.full)])
        return Delivery(down, wait, came)

    def after(self, trip: DownlinkRound, delivery: Delivery, links: State, now: float) -> tuple[Bytes, State]:
        return {}, {"mean": torch.tensor(trip.mean), "lost": torch.from_numpy(trip.dropped)}


@dataclass(frozen=True, kw_only=True)
class Broadcast(Downlink):
    """Every client receives each round's mean, and theta once at the start.

    One that was absent or dropped receives what it missed when it is back, or theta and the server's vectors if that is
    less; at the latest when it is selected.
    """

    absent: float = 0.0  # the share of clients that miss a round's mean

    def __post_init__(self) -> None:
        require(0 <= self.absent <= 1, f"broadcast: absent is a share of the clients in [0, 1], not {self.absent}.")

    def start(self, clients: int) -> State:
        return {
            "total": torch.tensor(0),  # bytes of all means so far
            "heard": torch.zeros(clients, dtype=torch.int64),  # of them by each client
            "free": torch.zeros(clients, dtype=torch.float64),  # virtual seconds when its link has nothing left to do
        }

    def deliver(self, trip: DownlinkRound, links: State) -> Delivery:
        cohort = trip.cohort
        if trip.round == 1:
            first = trip.held(1)
            return Delivery(times(trip.clients, first), trip.receiving(cohort, sum(first.values())), {})
        missed = self._due(trip, int(links["total"]) - links["heard"].numpy()[cohort])
        busy = np.maximum(links["free"].numpy()[cohort] - trip.now, 0)
        return Delivery(times(1, {"catch up": int(missed.sum())}), busy + trip.receiving(cohort, missed), {})

    def after(self, trip: DownlinkRound, delivery: Delivery, links: State, now: float) -> tuple[Bytes, State]:
        sent, heard = int(links["total"]), links["heard"].numpy().copy()
        free = self._free(trip, delivery, links)
        heard[trip.cohort] = sent  # it was brought up to date to take part
        there = np.ones(trip.clients, dtype=bool)
        if self.absent:
            there = generator(trip.seed, "absent", trip.round).random(trip.clients) >= self.absent
        there[trip.dropped] = False
        due = np.where(there, self._due(trip, sent + trip.mean - heard), 0)
        behind = heard < sent
        if trip.devices is not None:
            free = np.maximum(free, now) + trip.receiving(np.arange(trip.clients), due)
        heard[there] = sent + trip.mean
        down = {"mean": int(due[~behind].sum()), "catch up": int(due[behind].sum())}
        after = {"heard": torch.from_numpy(heard), "free": torch.from_numpy(free)}
        return times(1, down), {"total": torch.tensor(sent + trip.mean), **after}

    def _free(self, trip: DownlinkRound, delivery: Delivery, links: State) -> Array:
        """When each link has nothing left to do of what came before the end of the round."""
        everybody, free = np.arange(trip.clients), links["free"].numpy().copy()
        if trip.round == 1:
            return np.asarray(free + trip.receiving(everybody, sum(trip.held(1).values())))
        free[trip.cohort] = trip.now + delivery.wait
        return free

    def _due(self, trip: DownlinkRound, missed: Array) -> Array:
        """Bytes that bring a client up to date that has missed so many."""
        return np.asarray(np.minimum(missed, sum(trip.full.values())))


DOWNLINKS: dict[str, type[Downlink]] = {"pull": Pull, "broadcast": Broadcast, "overlap": Overlap}
