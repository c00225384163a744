"""FedNova (Wang et al., NeurIPS 2020): clients that make different numbers of steps pull theta equally hard.

The change of a client is lr G a: its gradients G, each with the weight that its local steps give it. A client uploads
its change divided by ||a||_1, and that number; the server multiplies the mean by the mean of the numbers (its eq. 8 and
Algorithm 1). a depends on the steps, on local momentum and on `mu` (its appendix A), not on data. As everywhere here,
the proximal term comes before local momentum; in the authors' code it comes after.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedadc.errors import require
from fedadc.methods.base import Method, require_beta, require_server_lr
from fedadc.models.vectors import State, Vector
from fedadc.views.local import Local
from fedadc.views.round_info import RoundInfo
from fedadc.views.setup import Setup


@dataclass(frozen=True, kw_only=True)
class FedNova(Method):
    """FedAvg of normalized updates: the number of local steps of a client does not weigh its update."""

    mu: float = 0.0  # μ of a proximal term, as in FedProx
    beta: float = 0.0  # momentum at the server, as in SlowMo
    server_lr: float = 1.0

    paper: ClassVar[str] = "Wang et al., NeurIPS 2020"
    numbers: ClassVar[tuple[str, ...]] = ("a",)
    sgd_only: ClassVar[str] = "it divides by the distance that a client's steps go, which is known for SGD alone"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.mu < math.inf, f"mu must be at least 0 and finite, not {self.mu}.")
        require_beta("beta", self.beta)
        require_server_lr(self.server_lr)

    def check(self, setup: Setup) -> None:
        work = setup.local
        largest = (1 - math.sqrt(work.momentum)) ** 2 / work.lr  # beyond it, some of a may be negative
        require(
            self.mu <= largest,
            f"method fednova needs mu of at most (1 - √local.momentum)² / local.lr, here {largest:.3g}; lower mu.",
        )

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        return g.add_(theta - local.start, alpha=self.mu) if self.mu else g

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        a = theta.new_full((1,), self.norm(local.steps, local.momentum, local.lr))
        return {"delta": (local.start - theta) / a, "a": a}, local.client

    def norm(self, steps: int, momentum: float, lr: float) -> float:
        """||a||_1: how far the steps of a client go, in units of lr, if every gradient is 1."""
        moved = velocity = 0.0
        for _ in range(steps):
            velocity = momentum * velocity + 1 - self.mu * lr * moved
            moved += velocity
        return moved

    def server_state(self, theta: Vector) -> State:
        return {"m": torch.zeros_like(theta)} if self.beta else {}

    def update(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        delta = float(mean["a"]) * mean["delta"]  # float(mean["a"]) is τ_eff
        if not self.beta:
            return theta - self.server_lr * delta, server
        m = self.beta * server["m"] + delta / info.lr
        return theta - self.server_lr * info.lr * m, {"m": m}
