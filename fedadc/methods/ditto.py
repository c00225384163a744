"""Ditto (Li et al., ICML 2021, Algorithm 1): FedAvg, plus a personal model of each client that stays close to theta_t.

A client's own model v minimizes f_k(v) + lam/2 ||v - theta_t||² (its eq. 2). As in the authors' code, its steps use the
same batches as the steps of the global model. It starts from the theta that the client receives in its first round. The
two gradients are clipped and decayed separately.
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
    """FedAvg, plus a model of each client's own that is pulled toward the global model."""

    lam: float = 0.1  # λ

    paper: ClassVar[str] = "Li et al., ICML 2021"
    computation: ClassVar[str] = "a second gradient / step"
    personalized: ClassVar[bool] = True
    sgd_only: ClassVar[str] = "a client trains two models, but there is one optimizer"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.lam < float("inf"), f"lam must be at least 0 and finite, not {self.lam}.")

    def check(self, setup: Setup) -> None:
        require(
            setup.local.momentum == 0,
            "method ditto takes two gradients per step, but there is only one local momentum; set local.momentum to 0.",
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
