"""How the vectors of a federation travel: what that takes in bytes and in virtual seconds, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from fedadc.communication.clock import Devices
from fedadc.communication.downlinks import Downlink, DownlinkRound, Pull
from fedadc.communication.ledger import Bytes, Ledger, sizes, total
from fedadc.communication.uplinks import Full, Uplink
from fedadc.data.dataset import Array
from fedadc.errors import require_types
from fedadc.models.vectors import State

FIGURES = "figures"  # among the links: the clock's fingerprint, which may not change during a run


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How vectors travel."""

    downlink: Downlink = field(default_factory=Pull)
    uplink: Uplink = field(default_factory=Full)

    def __post_init__(self) -> None:
        require_types(self, "communication", Downlink, Uplink)


@dataclass(frozen=True)
class Network:
    """The links between the server and its clients."""

    downlink: Downlink
    devices: Devices | None
    clients: int  # N
    seed: int
    full: Bytes  # of theta and the server's vectors that clients need
    sent_part: slice  # the part of theta that is sent
    select: Callable[[int], Array]  # the cohort of any round

    def start(self) -> State:
        """The links before the first round."""
        links = self.downlink.start(self.clients)
        if self.devices is not None:
            links |= {"now": _seconds(0), "last": _seconds(0), FIGURES: self.devices.fingerprint()}
        return links

    def could_be(self, links: State) -> bool:
        """True if these could be links of this network."""
        mine = self.start()
        if mine.keys() != links.keys() or (FIGURES in mine and not torch.equal(mine[FIGURES], links[FIGURES])):
            return False
        return all(v.dtype == links[n].dtype and (n == "lost" or v.shape == links[n].shape) for n, v in mine.items())

    def carry(
        self,
        round: int,
        cohort: Array,
        steps: Mapping[int, int],
        up: Mapping[int, Bytes],
        mean: State | None,
        links: State,
    ) -> tuple[Ledger, State]:
        """What a round sent, and the links after it.

        `steps` and `up` belong to the clients of the cohort that reported; `mean` is None if no upload is counted.
        """
        now, last = (float(links[name]) if name in links else 0.0 for name in ("now", "last"))
        dropped = np.array([client for client in cohort.tolist() if client not in steps], dtype=np.int64)
        around = self.downlink.looks_around
        trip = DownlinkRound(
            round=round,
            clients=self.clients,
            seed=self.seed,
            cohort=cohort,
            dropped=dropped,
            before=self.select(round - 1) if around and round > 1 else cohort[:0],
            next=self.select(round + 1) if around else cohort[:0],
            full=self.full,
            mean=self._size(mean),
            devices=self.devices,
            now=now,
            last=last,
        )
        delivery = self.downlink.deliver(trip, links)
        took = self._duration(trip, delivery.wait, steps, up)
        later, after = self.downlink.after(trip, delivery, links, now + took)
        if self.devices is not None:
            after |= {"now": _seconds(now + took), "last": _seconds(took), FIGURES: links[FIGURES]}
        return Ledger(total(up.values()), total([delivery.down, later]), delivery.ahead), after

    def _size(self, mean: State | None) -> int:
        """Bytes of the mean of a round's uploads, where it is sent to clients; 0 if there is none."""
        if not mean:
            return 0
        part = {"delta": mean["delta"][self.sent_part]} if "delta" in mean else {}
        return sum(sizes({**mean, **part}).values())

    def _duration(self, trip: DownlinkRound, wait: Array, steps: Mapping[int, int], up: Mapping[int, Bytes]) -> float:
        """Seconds until the slowest client has reported; where nobody does, until all have received."""
        if self.devices is None:
            return 0.0
        reports = np.array([client in steps for client in trip.cohort.tolist()])
        if not reports.any():
            return float(wait.max())
        clients = trip.cohort[reports]
        work = np.array([steps[client] for client in clients.tolist()])
        sent = np.array([sum(up.get(client, {}).values()) for client in clients.tolist()])
        busy = self.devices.computing(clients, work) + self.devices.sending(clients, sent)
        return float((wait[reports] + busy).max())


def _seconds(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
