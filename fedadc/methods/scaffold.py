"""SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1, option II): control variates correct the drift of every step.

H is the client's own number of local steps (K in its paper) and lr the rate it used, so delta / (H lr) is its mean
gradient. Local momentum is refused because it would inflate delta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedadc.errors import require
from fedadc.methods.base import Method, require_server_lr
from fedadc.models.vectors import State, Vector
from fedadc.views.local import Local
from fedadc.views.round_info import RoundInfo
from fedadc.views.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Scaffold(Method):
    """Every step is corrected by the difference between the server's and the client's mean gradient."""

    server_lr: float = 1.0  # η_g in the paper

    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    computation: ClassVar[str] = "2 vector operations / step"
    downlink: ClassVar[tuple[str, ...]] = ("c",)
    tracked: ClassVar[tuple[str, ...]] = ("c",)
    sgd_only: ClassVar[str] = "it takes delta / (H lr) for the mean gradient of a round"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_server_lr(self.server_lr)

    def check(self, setup: Setup) -> None:
        require(
            setup.local.momentum == 0,
            "method scaffold uses delta / (H lr) as the mean gradient of a round, which local momentum would inflate; "
            "set local.momentum to 0.",
        )

    def client_state(self, theta: Vector) -> State:
        return {"c": torch.zeros_like(theta)}

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        return g.sub_(local.client["c"]).add_(local.server["c"])  # eq. 3

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        delta = local.start - theta
        change = delta / (local.steps * local.lr) - local.server["c"]  # c_k⁺ - c_k, eq. 4
        return {"delta": delta, "c": change}, {"c": local.client["c"] + change}

    def server_state(self, theta: Vector) -> State:
        return {"c": torch.zeros_like(theta)}

    def update(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        return theta - self.server_lr * mean["delta"], {"c": server["c"] + mean["c"]}  # eq. 5
