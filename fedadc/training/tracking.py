"""Clients that repeat the server's update: instead of theta, they are sent the mean of a round's uploads.

Three messages beside those of `wire.py`: the state at the start of a round, the update that follows a round, and a task
without vectors. A `TrackedState` reads the first two, and has theta and the server's vectors for the third.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fedadc.errors import FedadcError, require
from fedadc.models.vectors import State, Vector
from fedadc.training.agreement import Agreement
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.replica import ServerReplica
from fedadc.training.wire import MessageHeader, TaskHeader, Wire, packed, require_alike, size_of
from fedadc.views.local_work import MOST
from fedadc.views.round_info import RoundInfo

ALL_CLIENTS = -1  # the client of a message that is the same for everybody
MAX_VECTORS = 16  # that a method may upload beside delta and what it tracks
LENGTH = 8  # bytes before every message of a bundle


class NotUpToDate(FedadcError):
    """A client lacks the state that its task needs."""


@dataclass(frozen=True)
class UpdateHeader(MessageHeader):
    """The header of an update: the numbers of the round that it ends."""

    lr: float
    counted: int
    clients: int


class TrackingWire(Wire):
    """Writes and reads the messages of downlinks with which clients repeat the server's update."""

    def write_state(self, round: int, theta: Vector, server: State) -> bytes:
        """What a client must know at the start of a round; in round 1, theta is enough."""
        vectors = {"theta": theta[self.agreement.sent_part]}
        if round > 1:
            vectors |= {f"server.{name}": server[name] for name in self.agreement.server.downlink(theta)}
        return packed(MessageHeader(*self._first("state", round)), vectors)

    def write_update(self, info: RoundInfo, mean: State | None) -> bytes:
        """The mean of a round's uploads, or nothing if none has counted."""
        header = UpdateHeader(*self._first("update", info.round), float(info.lr), info.counted, info.clients)
        vectors = dict(mean or {})
        if "delta" in vectors:
            vectors["delta"] = vectors["delta"][self.agreement.sent_part]
        return packed(header, vectors)

    def write_call(self, broadcast: ServerBroadcast, task: ClientTask) -> bytes:
        """A task for a client that has the vectors, or receives them beside it."""
        return packed(self._task_header("call", broadcast, task), {})

    def read_call(self, content: bytes, state: TrackedState) -> tuple[ServerBroadcast, ClientTask]:
        """A task, with the vectors of a state, which must be that of its round."""
        header, tensors = self._unpacked(content, "call", TaskHeader, 0)
        require_alike(tensors, {})
        self._require_possible(header)
        if state.round != header.round:
            raise NotUpToDate(f"it has the state of round {state.round}, but the task is of round {header.round}.")
        broadcast = ServerBroadcast(header.round, header.lr, state.theta, state.server, header.mean_size)
        return broadcast, ClientTask(header.client, header.steps, counted=header.counted)

    def read_state(self, content: bytes) -> tuple[int, Vector, State]:
        header, tensors = self._unpacked(content, "state", MessageHeader, size_of(self._down))
        require(1 <= header.round <= MOST, f"the message has an impossible round: {header.round}.")
        expected = self._down if header.round > 1 else {"theta": self._down["theta"]}
        require_alike(tensors, expected)
        theta = self.agreement.start.clone()
        theta[self.agreement.sent_part] = tensors["theta"].to(theta.device)
        if header.round == 1:
            server = self.agreement.server.start(theta)
            return 1, theta, {name: server[name] for name in self.agreement.server.downlink(theta)}
        vectors = {name.removeprefix("server."): v.to(theta.device) for name, v in tensors.items() if name != "theta"}
        return header.round, theta, vectors

    def read_update(self, content: bytes) -> tuple[RoundInfo, State | None]:
        theta = self.agreement.start
        most = (len(self.agreement.method.tracked) + 1 + MAX_VECTORS) * theta.numel() * theta.element_size()
        header, tensors = self._unpacked(content, "update", UpdateHeader, most)
        whole = (header.round, header.clients)
        valid = all(1 <= n <= MOST for n in whole) and 0 <= header.counted <= MOST and 0 < header.lr < math.inf
        require(valid, f"the message has impossible numbers: round and clients {whole}, lr {header.lr}.")
        info = RoundInfo(header.round, header.lr, header.counted, header.clients)
        require(bool(tensors) == bool(header.counted), "the message has a mean of no uploads, or none of some.")
        if not tensors:
            return info, None
        alike = all(v.dtype == theta.dtype and v.numel() <= theta.numel() for v in tensors.values())
        require(alike and "delta" in tensors, "the message has no delta, or vectors of another size or type.")
        delta = torch.zeros_like(theta)
        part = delta[self.agreement.sent_part]
        require(tensors["delta"].shape == part.shape, "the message has a delta of another size.")
        part.copy_(tensors["delta"])
        others = {name: vector.to(theta.device) for name, vector in tensors.items() if name != "delta"}
        return info, {"delta": delta, **others}

    def _first(self, kind: str, round: int) -> tuple[int, str, str, int, int]:
        return (*self._origin(kind), round, ALL_CLIENTS)


@dataclass
class TrackedState:
    """Theta and the server's vectors at the start of a round, as a client has them."""

    wire: TrackingWire
    round: int  # 0: it has nothing yet
    theta: Vector
    server: State

    @staticmethod
    def empty(agreement: Agreement) -> TrackedState:
        return TrackedState(TrackingWire(agreement), 0, agreement.start, {})

    def follow(self, messages: Iterable[bytes]) -> None:
        """Take states and updates, in order."""
        agreement = self.wire.agreement
        replica = ServerReplica.for_client(agreement.server, agreement.server.downlink(agreement.start))
        for message in messages:
            if self.wire.kind_of(message) == "state":
                self.round, self.theta, self.server = self.wire.read_state(message)
                continue
            info, mean = self.wire.read_update(message)
            if info.round != self.round:
                raise NotUpToDate(f"it has the state of round {self.round}, but the update is of round {info.round}.")
            self.theta, self.server = replica.updated(self.theta, self.server, mean, info)
            self.round += 1

    def content(self) -> bytes:
        """All of it as a message, to be read by `follow`."""
        return self.wire.write_state(self.round, self.theta, self.server)


def bundle(messages: Iterable[bytes]) -> bytes:
    """Messages one after the other, each with its length before it."""
    return b"".join(len(message).to_bytes(LENGTH, "little") + message for message in messages)


def unbundled(content: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(content):
        end = position + LENGTH + int.from_bytes(content[position : position + LENGTH], "little")
        require(position + LENGTH <= end <= len(content), "the message is damaged, or not one of fedadc.")
        yield content[position + LENGTH : end]
        position = end
