"""FedADC with double momentum (Algorithm 4): a client also averages its own gradients, beside the server's momentum.

The client's average, phi * m_i + (1 - phi) * g, starts at the first gradient of the round. It differs from the local
momentum of `local.momentum` (v = mu * v + g), and the two cannot be combined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedadc.errors import require
from fedadc.methods.base import Gradient, Method, require_beta, require_server_lr
from fedadc.models.vectors import State, Vector
from fedadc.views.local import Local
from fedadc.views.round_info import RoundInfo
from fedadc.views.setup import Setup


@dataclass(frozen=True, kw_only=True)
class FedADCDouble(Method):
    """FedADC whose clients keep a momentum of their own during a round."""

    beta: float = 0.9  # β
    phi: float = 0.9  # φ
    server_lr: float = 1.0  # α

    paper: ClassVar[str] = "Ozfatura et al., FedADC"
    computation: ClassVar[str] = "3 vector operations / step"
    downlink: ClassVar[tuple[str, ...]] = ("m",)
    sgd_only: ClassVar[str] = "the momentum m in every step is made of gradients, mean(delta) / lr"
    refused: ClassVar[Mapping[str, str]] = {
        "nesterov": "Algorithm 4 has no Nesterov form",
        "beta_local": "Algorithm 4 has one beta for server and clients",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require_beta("beta", self.beta)
        require_beta("phi", self.phi)
        require_server_lr(self.server_lr)

    def check(self, setup: Setup) -> None:
        require(
            setup.local.momentum == 0,
            "method fedadc_double has its own local momentum (phi); set local.momentum to 0.",
        )

    def begin(self, local: Local) -> Vector:
        local.scratch["m_bar"] = self.beta * local.server["m"] / local.steps  # line 5
        return local.start

    def step(self, theta: Vector, grad: Gradient, local: Local) -> Vector:
        g = grad(theta)  # line 7
        if local.step == 0:
            local.scratch["m_i"] = g.clone()  # line 10
        else:
            local.scratch["m_i"].mul_(self.phi).add_(g, alpha=1 - self.phi)  # line 12
        return theta.sub_(local.scratch["m_bar"] + local.scratch["m_i"], alpha=local.lr)  # line 14

    def server_state(self, theta: Vector) -> State:
        return {"m": torch.zeros_like(theta)}

    def update(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        m = mean["delta"] / info.lr  # lines 19 and 21
        return theta - self.server_lr * info.lr * m, {"m": m}  # line 23
