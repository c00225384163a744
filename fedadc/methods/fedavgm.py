"""FedAvgM (Hsu, Qi and Brown, 2019): m = beta m + mean(delta), theta - server_lr m.

SlowMo divides the mean delta by the clients' learning rate and multiplies its step by that rate again, so the two
methods are equal as long as the rate is constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedadc.methods.base import Method, require_beta, require_server_lr
from fedadc.models.vectors import State, Vector
from fedadc.views.round_info import RoundInfo


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Method):
    """Momentum at the server over the mean of the deltas."""

    beta: float = 0.9  # β
    server_lr: float = 1.0

    paper: ClassVar[str] = "Hsu et al., 2019"
    computation: ClassVar[str] = "server only"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_beta("beta", self.beta)
        require_server_lr(self.server_lr)

    def server_state(self, theta: Vector) -> State:
        return {"m": torch.zeros_like(theta)}

    def update(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        m = self.beta * server["m"] + mean["delta"]
        return theta - self.server_lr * m, {"m": m}
