"""Training without a federation, the lower bound: every client trains its own model, and nothing is sent.

A run is judged by the mean of the metrics of all clients' own models; a client that was never selected has the initial
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedadc.errors import require
from fedadc.methods.base import Method
from fedadc.models.vectors import State, Vector
from fedadc.views.local import Local
from fedadc.views.round_info import RoundInfo
from fedadc.views.setup import Setup


@dataclass(frozen=True, kw_only=True)
class LocalOnly(Method):
    """Every client trains its own model on its own data."""

    federated: ClassVar[bool] = False

    def check(self, setup: Setup) -> None:
        require(
            not self.objective.asks_the_global_model,
            f"method local_only has no global model, which objective {type(self.objective).__name__} needs; choose "
            "another objective.",
        )

    def client_state(self, theta: Vector) -> State:
        return {"model": theta}

    def begin(self, local: Local) -> Vector:
        return local.client["model"]

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        return {}, {"model": theta}

    def update(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        return theta, server

    def personal(self, theta: Vector, client: State) -> Vector:
        return client["model"]
