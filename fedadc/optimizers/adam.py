"""Adam (Kingma and Ba, ICLR 2015, Algorithm 1) and AdamW (Loshchilov and Hutter, ICLR 2019, Algorithm 2) at a client.

m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g², from 0; after t steps the direction is
(m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps). AdamW adds weight decay × theta to the direction; with Adam,
weight decay is in g. The moments begin anew in every client's round, or stay at the client with its number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedadc.errors import require
from fedadc.optimizers.base import Optimizer, State, Stepper

FIRST_MOMENT, SECOND_MOMENT, ADAM_STEPS = "adam_m", "adam_v", "adam_steps"  # names in a client's state


class AdamStepper(Stepper):
    """The moments of one client during its round."""

    def __init__(self, settings: Adam, theta: Tensor, client: State) -> None:
        self.settings, self.used = settings, False  # used: in the present step
        start = client if settings.moments == "client" else _no_moments(theta)
        self.m, self.v, self.t = start[FIRST_MOMENT].clone(), start[SECOND_MOMENT].clone(), int(start[ADAM_STEPS])
        self._m, self._v = torch.empty_like(self.m), torch.empty_like(self.v)  # after the present step

    def __call__(self, g: Tensor) -> Tensor:
        beta1, beta2, t = self.settings.beta1, self.settings.beta2, self.t + 1
        torch.mul(self.m, beta1, out=self._m).add_(g, alpha=1 - beta1)
        torch.mul(self.v, beta2, out=self._v).addcmul_(g, g, value=1 - beta2)
        self.used = True
        scale = torch.sqrt(self._v).div_(math.sqrt(1 - beta2**t)).add_(self.settings.eps)
        return torch.div(self._m, 1 - beta1**t, out=g).div_(scale)

    def next_step(self) -> None:
        if self.used:
            self.m, self._m, self.v, self._v = self._m, self.m, self._v, self.v
            self.t, self.used = self.t + 1, False

    def state(self) -> State:
        if self.settings.moments == "round":
            return {}
        return {FIRST_MOMENT: self.m, SECOND_MOMENT: self.v, ADAM_STEPS: torch.tensor([self.t])}


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adaptive steps; weight decay is added to the gradient."""

    beta1: float = 0.9  # β₁
    beta2: float = 0.999  # β₂
    eps: float = 1e-8  # ε
    moments: Literal["round", "client"] = "round"  # begin anew in every client's round, or stay at the client

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must be in [0, 1), not {value}.")
        require(0 < self.eps < math.inf, f"eps must be positive and finite, not {self.eps}.")

    def client_state(self, theta: Tensor) -> State:
        """No moments yet, where they stay at the client."""
        return _no_moments(theta) if self.moments == "client" else {}

    def stepper(self, theta: Tensor, client: State) -> Stepper:
        """The moments of a round."""
        return AdamStepper(self, theta, client)


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam whose weight decay is apart from the moments."""

    decoupled: ClassVar[bool] = True


def _no_moments(theta: Tensor) -> State:
    return {
        FIRST_MOMENT: torch.zeros_like(theta),
        SECOND_MOMENT: torch.zeros_like(theta),
        ADAM_STEPS: torch.zeros(1, dtype=torch.int64),
    }
