"""FedAdam, FedYogi and FedAdagrad (Reddi et al., ICLR 2021, Algorithm 2): adaptive optimizers at the server.

The mean delta is used as the gradient. There is no bias correction, and v starts at tau², not at 0. (The paper's Delta
has the opposite sign, so it adds where this code subtracts.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedadc.errors import require
from fedadc.methods.base import Method, require_beta, require_server_lr
from fedadc.models.vectors import State, Vector
from fedadc.views.round_info import RoundInfo


@dataclass(frozen=True, kw_only=True)
class FedOpt(Method):
    """The base class of the three methods; subclass it and write `second_moment`."""

    beta1: float = 0.9  # β₁
    tau: float = 1e-3  # τ, the degree of adaptivity
    server_lr: float = 0.01  # η in the paper

    paper: ClassVar[str] = "Reddi et al., ICLR 2021"
    computation: ClassVar[str] = "server only"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_beta("beta1", self.beta1)
        require(0 < self.tau < float("inf"), f"tau must be positive and finite, not {self.tau}.")
        require_server_lr(self.server_lr)

    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        """The new v, from the old v and the squared mean delta."""
        raise NotImplementedError

    def server_state(self, theta: Vector) -> State:
        return {"m": torch.zeros_like(theta), "v": torch.full_like(theta, self.tau**2)}

    def update(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        delta = mean["delta"]
        m = self.beta1 * server["m"] + (1 - self.beta1) * delta
        v = self.second_moment(server["v"], delta**2)
        return theta - self.server_lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}


@dataclass(frozen=True, kw_only=True)
class FedAdam(FedOpt):
    """Adam at the server."""

    beta2: float = 0.99  # β₂

    def __post_init__(self) -> None:
        super().__post_init__()
        require_beta("beta2", self.beta2)

    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedOpt):
    """Yogi at the server: v changes by at most the new square."""

    beta2: float = 0.99  # β₂

    def __post_init__(self) -> None:
        super().__post_init__()
        require_beta("beta2", self.beta2)

    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        return v - (1 - self.beta2) * squared * (v - squared).sign()


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(FedOpt):
    """Adagrad at the server: v only grows."""

    beta1: float = 0.0  # β₁, as in the paper's experiments

    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        return v + squared
