"""Ditto (Li et al., ICML 2021, Algorithm 1): FedAvg, and beside it a model of each client's own, held near theta_t.

A client's own model v minimizes f_k(v) + lam/2 ||v - theta_t||² (its eq. 2) by steps on the batches of the global
model's, as in the authors' code; it starts where the client's first round does. Each of the two gradients is clipped
and decayed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedadc.errors import require
from fedadc.methods.base import Gradient, Method
from fedadc.models.vectors import State, Vector
from fedadc.views.local import Local
from fedadc.views.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """FedAvg, and a model of each client's own that is pulled toward the global one."""

    lam: float = 0.1  # λ

    paper: ClassVar[str] = "Li et al., ICML 2021"
    computation: ClassVar[str] = "a second gradient / step"
    personalized: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(0 <= self.lam < float("inf"), f"ditto: lam must not be negative, not {self.lam}.")

    def check(self, setup: Setup) -> None:
        require(
            setup.local.momentum == 0,
            "method ditto takes two gradients a step, for which there is one local momentum; set local.momentum to 0.",
        )

    def client_state(self, theta: Vector) -> State:
        return {"model": theta}

    def begin(self, local: Local) -> Vector:
        local.scratch["v"] = local.client["model"].clone()
        return local.start

    def step(self, theta: Vector, grad: Gradient, local: Local) -> Vector:
        theta.sub_(grad(theta), alpha=local.lr)
        v = local.scratch["v"]
        v.sub_(grad(v).add_(v - local.start, alpha=self.lam), alpha=local.lr)
        return theta

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        return {"delta": local.start - theta}, {"model": local.scratch["v"]}

    def personal(self, theta: Vector, client: State) -> Vector:
        return client["model"].to(theta.device)
