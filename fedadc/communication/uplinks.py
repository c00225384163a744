"""What a client sends of its delta: all of it, its largest entries, or eight bits for each.

An uplink is a frozen dataclass: `encode` makes the message that travels, `decode` what the server reads in it. Only
delta is encoded: tracked uploads must stay exact, or SCAFFOLD's c would no longer be the mean of all clients' c_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedadc.errors import require, undefined
from fedadc.models.vectors import State, Vector

RESIDUAL = "uplink_residual"  # its name in a client's state


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """Base of all uplinks; subclass it and write `encode` and `decode`."""

    exact: ClassVar[bool] = False  # the server reads what the client sent, bit for bit

    def client_state(self, delta: Vector) -> State:
        """What it keeps at a client that is selected for the first time."""
        return {}

    def encode(self, delta: Vector, client: State, rng: np.random.Generator) -> tuple[State, State]:
        """The message, and what the client keeps; that takes effect only if the upload is counted."""
        raise undefined(self, "encode(delta, client, rng)")

    def decode(self, message: State, length: int) -> Vector:
        """A delta of so many entries, as the server reads it."""
        raise undefined(self, "decode(message, length)")


@dataclass(frozen=True, kw_only=True)
class Full(Uplink):
    """Every entry as it is."""

    exact: ClassVar[bool] = True

    def encode(self, delta: Vector, client: State, rng: np.random.Generator) -> tuple[State, State]:
        return {"delta": delta}, {}

    def decode(self, message: State, length: int) -> Vector:
        return message["delta"]


@dataclass(frozen=True, kw_only=True)
class TopK(Uplink):
    """The largest entries; what was not sent is added to the client's next delta (error feedback)."""

    share: float = 0.1  # of the entries
    error_feedback: bool = True

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"top_k: share must lie in (0, 1], not {self.share}.")

    def client_state(self, delta: Vector) -> State:
        return {RESIDUAL: torch.zeros_like(delta)} if self.error_feedback else {}

    def encode(self, delta: Vector, client: State, rng: np.random.Generator) -> tuple[State, State]:
        wanted = delta + client[RESIDUAL] if self.error_feedback else delta
        k = math.ceil(self.share * len(wanted) * (1 - 1e-12))  # 7 of 100 at .07, though .07 * 100 is a little more
        index = wanted.abs().topk(k).indices.sort().values
        message = {"values": wanted[index], "index": index.to(torch.int32 if len(wanted) < 2**31 else torch.int64)}
        return message, {RESIDUAL: wanted.index_fill(0, index, 0)} if self.error_feedback else {}

    def decode(self, message: State, length: int) -> Vector:
        values = message["values"]
        return values.new_zeros(length).index_copy(0, message["index"].long(), values)


@dataclass(frozen=True, kw_only=True)
class EightBit(Uplink):
    """Each entry as one of 255 levels, rounded up or down at random so that it is right on average."""

    block: int = 256  # entries that share a scale, the largest of them in absolute value

    def __post_init__(self) -> None:
        require(1 <= self.block <= 10**9, f"eight_bit: block must be at least 1 and at most 10^9, not {self.block}.")

    def encode(self, delta: Vector, client: State, rng: np.random.Generator) -> tuple[State, State]:
        blocks = self._blocks(delta)
        scale = blocks.abs().amax(dim=1, keepdim=True)
        level = torch.where(scale > 0, blocks / scale, 0).mul_(127)
        below = level.floor()
        kind = np.float64 if delta.dtype == torch.float64 else np.float32
        drawn = torch.from_numpy(rng.random(delta.numel(), dtype=kind)).to(delta.device, delta.dtype)
        level = below + (self._blocks(drawn) < level - below)
        return {"levels": level.to(torch.int8).view(-1)[: len(delta)], "scale": scale.view(-1)}, {}

    def decode(self, message: State, length: int) -> Vector:
        scale = message["scale"][:, None]
        levels = self._blocks(message["levels"].to(scale.dtype))
        return (levels * (scale / 127)).view(-1)[:length]

    def _blocks(self, vector: Vector) -> Vector:
        block = min(self.block, max(1, len(vector)))
        return torch.nn.functional.pad(vector, (0, -len(vector) % block)).view(-1, block)


UPLINKS: dict[str, type[Uplink]] = {"full": Full, "top_k": TopK, "eight_bit": EightBit}
