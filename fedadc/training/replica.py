"""A client that repeats the server's update, for downlinks that send the mean of the uploads instead of theta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedadc.communication.downlinks import Downlink
from fedadc.errors import FedadcError, require
from fedadc.models.vectors import State, Vector
from fedadc.training.server import Server
from fedadc.views.round_info import RoundInfo


@dataclass(frozen=True)
class ServerReplica:
    """Updates theta from the mean with the server vectors that clients are sent, and no others."""

    server: Server
    names: tuple[str, ...]  # of the server vectors that clients have
    seen: Callable[[RoundInfo, State | None], None] = lambda info, mean: None  # called with the mean of every round

    @staticmethod
    def of(server: Server, downlink: tuple[str, ...], scheme: Downlink, theta: Vector) -> ServerReplica:
        """Refuse a server whose state is not sent to clients."""
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
        return ServerReplica.for_client(server, downlink)

    @staticmethod
    def for_client(server: Server, downlink: tuple[str, ...]) -> ServerReplica:
        return ServerReplica(Server(server.method, server.ensembles.only(downlink)), downlink)

    def updated(self, theta: Vector, server: State, mean: State | None, info: RoundInfo) -> tuple[Vector, State]:
        """Theta and the vectors that clients have, after a round."""
        after, state = self.server.updated(theta, {name: server[name] for name in self.names}, mean, info)
        return after, {name: state[name] for name in self.names}

    def require_same_update(
        self, theta: Vector, server: State, mean: State | None, info: RoundInfo, expected: tuple[Vector, State]
    ) -> None:
        """Repeat an update from the state before it, and require the server's result bit for bit."""
        self.seen(info, mean)
        after, state = self.updated(theta, server, mean, info)
        for name, vector in {"theta": after, **state}.items():
            if not torch.equal(vector, expected[0] if name == "theta" else expected[1][name]):
                raise FedadcError(
                    f"round {info.round}: {type(self.server.method).__name__}.update gave clients another {name} than "
                    "the server; it must depend on its arguments alone. communication.downlink=pull works without."
                )
