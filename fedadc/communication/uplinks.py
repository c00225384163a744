"""Uplinks: how a client sends its delta. In full, only its largest entries, or with eight bits per entry.

An uplink is a frozen dataclass. `encode` creates the message that is sent, and `decode` restores the delta from it at
the server. Only delta is encoded. Tracked uploads must stay exact: otherwise SCAFFOLD's c would not remain the mean of
all clients' c_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedadc.errors import require, undefined
from fedadc.fields.settings import Settings
from fedadc.models.vectors import State, Vector

RESIDUAL = "uplink_residual"  # the name of the residual in a client's state


@dataclass(frozen=True, kw_only=True)
class Uplink(Settings):
    """Base class of all uplinks. Subclasses implement `encode` and `decode`."""

    exact: ClassVar[bool] = False  # True if the server receives the client's delta bit for bit

    def client_state(self, delta: Vector) -> State:
        """The uplink's initial state at a client that is selected for the first time."""
        return {}

    def encode(self, delta: Vector, client: State, rng: np.random.Generator) -> tuple[State, State]:
        """The message, and the client's new uplink state, which takes effect only if the upload is counted."""
        raise undefined(self, "encode(delta, client, rng)")

    def decode(self, message: State, length: int) -> Vector:
        """The delta of `length` entries that the server restores from a message."""
        raise undefined(self, "decode(message, length)")


@dataclass(frozen=True, kw_only=True)
class Full(Uplink):
    """Every entry, uncompressed."""

    exact: ClassVar[bool] = True

    def encode(self, delta: Vector, client: State, rng: np.random.Generator) -> tuple[State, State]:
        return {"delta": delta}, {}

    def decode(self, message: State, length: int) -> Vector:
        return message["delta"]


@dataclass(frozen=True, kw_only=True)
class TopK(Uplink):
    """Only the largest entries; the rest is added to the client's next delta (error feedback)."""

    share: float = 0.1  # share of the entries that is sent
    error_feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.share <= 1, f"share must be in (0, 1], not {self.share}.")

    def client_state(self, delta: Vector) -> State:
        return {RESIDUAL: torch.zeros_like(delta)} if self.error_feedback else {}

    def encode(self, delta: Vector, client: State, rng: np.random.Generator) -> tuple[State, State]:
        corrected = delta + client[RESIDUAL] if self.error_feedback else delta
        k = math.ceil(self.share * len(corrected) * (1 - 1e-12))  # 7 of 100 at .07, although .07 * 100 > 7 in floats
        index = corrected.abs().topk(k).indices.sort().values
        index_type = torch.int32 if len(corrected) < 2**31 else torch.int64
        message = {"values": corrected[index], "index": index.to(index_type)}
        return message, {RESIDUAL: corrected.index_fill(0, index, 0)} if self.error_feedback else {}

    def decode(self, message: State, length: int) -> Vector:
        values = message["values"]
        return values.new_zeros(length).index_copy(0, message["index"].long(), values)


@dataclass(frozen=True, kw_only=True)
class EightBit(Uplink):
    """Each entry as one of 255 levels; random rounding makes it correct on average."""

    block: int = 256  # entries that share one scale, their largest absolute value

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.block <= 10**9, f"block must be at least 1 and at most 10^9, not {self.block}.")

    def encode(self, delta: Vector, client: State, rng: np.random.Generator) -> tuple[State, State]:
        blocks = self._blocks(delta)
        scale = blocks.abs().amax(dim=1, keepdim=True)
        level = torch.where(scale > 0, blocks / scale, 0).mul_(127)
        below = level.floor()
        dtype = np.float64 if delta.dtype == torch.float64 else np.float32
        uniform = torch.from_numpy(rng.random(delta.numel(), dtype=dtype)).to(delta.device, delta.dtype)
        level = below + (self._blocks(uniform) < level - below)
        return {"levels": level.to(torch.int8).view(-1)[: len(delta)], "scale": scale.view(-1)}, {}

    def decode(self, message: State, length: int) -> Vector:
        scale = message["scale"][:, None]
        levels = self._blocks(message["levels"].to(scale.dtype))
        return (levels * (scale / 127)).view(-1)[:length]

    def _blocks(self, vector: Vector) -> Vector:
        """The vector as rows of `block` entries, padded with zeros."""
        block = min(self.block, max(1, len(vector)))
        return torch.nn.functional.pad(vector, (0, -len(vector) % block)).view(-1, block)


UPLINKS: dict[str, type[Uplink]] = {"full": Full, "top_k": TopK, "eight_bit": EightBit}
