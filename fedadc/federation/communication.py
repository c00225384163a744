"""How the vectors of a federation travel: what that takes in bytes and in virtual seconds, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from fedadc.data.dataset import Array
from fedadc.errors import FedadcError, require, require_kinds
from fedadc.federation.clock import Devices
from fedadc.federation.downlink import Downlink, Pull, Trip
from fedadc.federation.ledger import Bytes, Ledger, total
from fedadc.federation.server import Server
from fedadc.federation.uplink import Full, Uplink
from fedadc.methods.base import RoundInfo, State, Vector

FIGURES = "figures"  # among the links: a mark of the clock's, which may not change in the middle of a run


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How vectors travel."""

    downlink: Downlink = field(default_factory=Pull)
    uplink: Uplink = field(default_factory=Full)

    def __post_init__(self) -> None:
        require_kinds(self, "communication", Downlink, Uplink)


@dataclass(frozen=True)
class Wire:
    """What lies between the server and its clients."""

    downlink: Downlink
    devices: Devices | None
    clients: int  # N
    seed: int
    full: Bytes  # of theta and the server's vectors that clients need
    select: Callable[[int], Array]  # the cohort of any round

    def start(self) -> State:
        """The links before the first round."""
        links = self.downlink.start(self.clients)
        if self.devices is not None:
            links |= {"now": _seconds(0), "last": _seconds(0), FIGURES: self.devices.mark()}
        return links

    def could_be(self, links: State) -> bool:
        """Whether these are links of this wire."""
        mine = self.start()
        if mine.keys() != links.keys() or (FIGURES in mine and not torch.equal(mine[FIGURES], links[FIGURES])):
            return False
        return all(v.dtype == links[n].dtype and (n == "lost" or v.shape == links[n].shape) for n, v in mine.items())

    def carried(
        self, round: int, cohort: Array, steps: Mapping[int, int], up: Mapping[int, Bytes], mean: int, links: State
    ) -> tuple[Ledger, State]:
        """What a round cost, and the links after it.

        `steps` and `up` are of those clients of the cohort that reported; `mean` is the mean's size, 0 without one.
        """
        now, last = (float(links[name]) if name in links else 0.0 for name in ("now", "last"))
        dropped = np.array([client for client in cohort.tolist() if client not in steps], dtype=np.int64)
        around = self.downlink.looks_around
        trip = Trip(
            round=round,
            clients=self.clients,
            seed=self.seed,
            cohort=cohort,
            dropped=dropped,
            before=self.select(round - 1) if around and round > 1 else cohort[:0],
            next=self.select(round + 1) if around else cohort[:0],
            full=self.full,
            mean=mean,
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

    def _duration(self, trip: Trip, wait: Array, steps: Mapping[int, int], up: Mapping[int, Bytes]) -> float:
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


@dataclass(frozen=True)
class Tracker:
    """A client that repeats the server's update from the mean: with the vectors that it is sent, no others."""

    server: Server
    names: tuple[str, ...]  # of the server's vectors that it has

    @staticmethod
    def of(server: Server, downlink: tuple[str, ...], scheme: Downlink, theta: Vector) -> Tracker:
        """Refuse a server whose state does not travel."""
        method, ensembles = server.method, server.ensembles
        require(method.federated, f"communication.downlink: {type(method).__name__} sends nothing, so only pull fits.")
        needed = {*method.server_state(theta), *method.objective.server_state(theta)}
        hidden = sorted((needed | ({"lookahead"} if ensembles.resets else set())) - set(downlink))
        if hidden:
            names = [type(owner).__name__ for owner in (scheme, method, method.objective)]
            raise FedadcError(
                f"communication.downlink: with {names[0].lower()}, clients repeat the server's update, but they are "
                f"never sent {', '.join(hidden)} of {names[1]} with {names[2]}; use pull."
            )
        return Tracker(Server(method, ensembles.only(downlink)), downlink)

    def updated(self, theta: Vector, server: State, mean: State | None, info: RoundInfo) -> tuple[Vector, State]:
        return self.server.updated(theta, {name: server[name] for name in self.names}, mean, info)

    def require_same(self, mine: tuple[Vector, State], theta: Vector, server: State, round: int) -> None:
        """What a client has made is what the server has, bit for bit."""
        for name, vector in {"theta": mine[0], **mine[1]}.items():
            require(
                torch.equal(vector, theta if name == "theta" else server[name]),
                f"round {round}: {type(self.server.method).__name__}.update gave clients another {name} than the "
                "server; it must depend on its arguments alone. communication.downlink=pull does without.",
            )
