"""FedPer (Arivazhagan et al., 2019): clients share the body, each has its own head, and every step trains both.

Only the body is sent. The head in theta keeps its initial values, so a run is judged by the clients' own models only.
Objectives that use predictions of the received model are refused, because that model has an untrained head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedadc.errors import require
from fedadc.methods.base import Method, require_body
from fedadc.models.vectors import State, Vector
from fedadc.views.local import Local
from fedadc.views.setup import Setup


@dataclass(frozen=True, kw_only=True)
class FedPer(Method):
    """A shared body and a head of each client's own, trained together."""

    paper: ClassVar[str] = "Arivazhagan et al., 2019"
    travels: ClassVar[str] = "embed"
    personalized: ClassVar[bool] = True

    def check(self, setup: Setup) -> None:
        name = type(self).__name__.lower()
        require_body(setup.model, name)
        require(
            not self.objective.asks_the_global_model,
            f"method {name} shares no head, so there is no complete global model, which objective "
            f"{type(self.objective).__name__} needs; choose another objective.",
        )

    def client_state(self, theta: Vector) -> State:
        return {"head": theta}  # all of theta, which ends with the initial head: the size of a head is not known here

    def begin(self, local: Local) -> Vector:
        return self.personal(local.start, local.client)

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        head, delta = local.model.part("head"), local.start - theta
        delta[head] = 0
        return {"delta": delta}, {"head": theta[head]}

    def personal(self, theta: Vector, client: State) -> Vector:
        head = client["head"]
        return torch.cat([theta[: len(theta) - len(head)], head.to(theta.device)])
