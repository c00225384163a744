"""SlowMo (Wang et al., 2020; Algorithm 2 of the FedADC paper): momentum at the server over the mean of the deltas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedadc.methods.base import Method, require_beta, require_server_lr
from fedadc.models.vectors import State, Vector
from fedadc.views.round_info import RoundInfo


@dataclass(frozen=True, kw_only=True)
class SlowMo(Method):
    """Momentum at the server; local steps as in FedAvg."""

    beta: float = 0.9  # β
    server_lr: float = 1.0  # α

    paper: ClassVar[str] = "Wang et al., ICLR 2020"
    computation: ClassVar[str] = "server only"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_beta("beta", self.beta)
        require_server_lr(self.server_lr)

    def server_state(self, theta: Vector) -> State:
        return {"m": torch.zeros_like(theta)}

    def update(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        g_bar = mean["delta"] / info.lr  # line 12
        m = self.beta * server["m"] + g_bar  # line 14
        return theta - self.server_lr * info.lr * m, {"m": m}  # line 16
