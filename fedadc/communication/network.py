"""The network of a federation: the bytes that each round sends and the virtual seconds that it takes."""

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
from fedadc.fields.settings import Settings
from fedadc.models.vectors import State

FIGURES = "figures"  # key in the links: the fingerprint of the clock's values, which must not change during a run


@dataclass(frozen=True, kw_only=True)
class Communication(Settings):
    """How vectors are sent: the downlink and the uplink."""

    downlink: Downlink = field(default_factory=Pull)
    uplink: Uplink = field(default_factory=Full)


@dataclass(frozen=True)
class Network:
    """The links between the server and its clients."""

    downlink: Downlink
    devices: Devices | None
    clients: int  # N
    seed: int
    full: Bytes  # theta and the server's vectors that clients need
    sent_part: slice  # the part of theta that is sent
    select: Callable[[int], Array]  # returns the cohort of any round

    def start(self) -> State:
        """The state of the links before the first round."""
        links = self.downlink.start(self.clients)
        if self.devices is not None:
            links |= {"now": _seconds(0), "last": _seconds(0), FIGURES: self.devices.fingerprint()}
        return links

    def fits(self, links: State) -> bool:
        """True if these links have the format of this network and the same clock."""
        expected = self.start()
        if expected.keys() != links.keys():
            return False
        if FIGURES in expected and not torch.equal(expected[FIGURES], links[FIGURES]):
            return False
        return all(
            tensor.dtype == links[name].dtype and (name == "lost" or tensor.shape == links[name].shape)
            for name, tensor in expected.items()
        )

    def carry(
        self,
        round: int,
        cohort: Array,
        steps: Mapping[int, int],
        up: Mapping[int, Bytes],
        mean: State | None,
        links: State,
    ) -> tuple[Ledger, State]:
        """The ledger of a round, and the state of the links after it.

        `steps` and `up` (bytes sent) are those of the clients that report. `mean` is None if no upload is counted.
        """
        now, last_duration = (float(links[name]) if name in links else 0.0 for name in ("now", "last"))
        dropped = np.array([client for client in cohort.tolist() if client not in steps], dtype=np.int64)
        neighbors = self.downlink.needs_neighboring_cohorts
        info = DownlinkRound(
            round=round,
            clients=self.clients,
            seed=self.seed,
            cohort=cohort,
            dropped=dropped,
            previous_cohort=self.select(round - 1) if neighbors and round > 1 else cohort[:0],
            next_cohort=self.select(round + 1) if neighbors else cohort[:0],
            full=self.full,
            mean_bytes=self._mean_bytes(mean),
            devices=self.devices,
            now=now,
            last_duration=last_duration,
        )
        delivery = self.downlink.deliver(info, links)
        duration = self._duration(info, delivery.wait, steps, up)
        sent_after, after = self.downlink.after(info, delivery, links, now + duration)
        if self.devices is not None:
            after |= {"now": _seconds(now + duration), "last": _seconds(duration), FIGURES: links[FIGURES]}
        return Ledger(total(up.values()), total([delivery.down, sent_after]), delivery.ahead), after

    def _mean_bytes(self, mean: State | None) -> int:
        """Bytes of the mean of a round's uploads, as it would be sent to clients; 0 if there is none."""
        if not mean:
            return 0
        part = {"delta": mean["delta"][self.sent_part]} if "delta" in mean else {}
        return sum(sizes({**mean, **part}).values())

    def _duration(self, info: DownlinkRound, wait: Array, steps: Mapping[int, int], up: Mapping[int, Bytes]) -> float:
        """Seconds until the slowest client has reported; if none reports, until all clients have received."""
        if self.devices is None:
            return 0.0
        reports = np.array([client in steps for client in info.cohort.tolist()])
        if not reports.any():
            return float(wait.max())
        clients = info.cohort[reports]
        work = np.array([steps[client] for client in clients.tolist()])
        sent = np.array([sum(up.get(client, {}).values()) for client in clients.tolist()])
        busy = self.devices.computing(clients, work) + self.devices.sending(clients, sent)
        return float((wait[reports] + busy).max())


def _seconds(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
