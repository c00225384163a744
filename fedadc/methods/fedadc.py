"""FedADC (Algorithm 3): the server's momentum is embedded in every local step.

Heavy-ball (blue in the paper): a step applies gradient and momentum together. Nesterov (red): the momentum moves the
model first, and the gradient is taken at that point. FedADC+ is this method with the objective `SelfConfidence`
(section III). Each client divides the momentum by its own number of steps, so every client embeds exactly
beta_local * m in a round.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch

from fedadc.methods.base import Gradient, Method, require_beta, require_server_lr
from fedadc.models.vectors import State, Vector
from fedadc.views.local import Local
from fedadc.views.round_info import RoundInfo


@dataclass(frozen=True, kw_only=True)
class FedADC(Method):
    """Accelerated federated learning with drift control."""

    beta: float = 0.9  # β_global
    beta_local: float | None = field(default=None, metadata={"default": "beta"})  # β_local
    nesterov: bool = False
    server_lr: float = 1.0  # α

    paper: ClassVar[str] = "Ozfatura et al., FedADC"
    computation: ClassVar[str] = "1 vector operation / step"
    downlink: ClassVar[tuple[str, ...]] = ("m",)
    sgd_only: ClassVar[str] = "the momentum m in every step is made of gradients, mean(delta) / lr"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_beta("beta", self.beta)
        require_beta("beta_local", self._beta_local)
        require_server_lr(self.server_lr)

    def complete(self) -> Self:
        return replace(self, beta_local=self._beta_local)

    @property
    def _beta_local(self) -> float:
        return self.beta if self.beta_local is None else self.beta_local

    def begin(self, local: Local) -> Vector:
        local.scratch["m_bar"] = self._beta_local * local.server["m"] / local.steps  # line 5
        return local.start

    def step(self, theta: Vector, grad: Gradient, local: Local) -> Vector:
        m_bar = local.scratch["m_bar"]
        if self.nesterov:
            half = theta.sub_(m_bar, alpha=local.lr)  # line 7
            return half.sub_(grad(half), alpha=local.lr)  # lines 8 and 9
        return theta.sub_(grad(theta).add_(m_bar), alpha=local.lr)  # lines 10 and 11

    def server_state(self, theta: Vector) -> State:
        return {"m": torch.zeros_like(theta)}

    def update(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        delta_bar = mean["delta"] / info.lr  # line 16
        m = delta_bar + (self.beta - self._beta_local) * server["m"]  # line 17
        return theta - self.server_lr * info.lr * m, {"m": m}  # line 19
