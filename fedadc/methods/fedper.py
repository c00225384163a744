"""FedPer (Arivazhagan et al., 2019): the body is everybody's, the head each client's own; a step trains both.

Only the body travels. The head of theta stays the initial one, which everybody knows, so a run is judged by the
clients' own models alone. Objectives that ask the received model would ask that head, and are refused.
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
    """A shared body, a head of each client's own, trained together."""

    paper: ClassVar[str] = "Arivazhagan et al., 2019"
    travels: ClassVar[str] = "embed"
    personalized: ClassVar[bool] = True

    def check(self, setup: Setup) -> None:
        name = type(self).__name__.lower()
        require_body(setup.model, name)
        require(
            not self.objective.asks_the_global_model,
            f"method {name} shares no head, so {type(self.objective).__name__} cannot ask the global model for its "
            "opinion; choose another objective.",
        )

    def client_state(self, theta: Vector) -> State:
        return {"head": theta}  # whose end is the initial head: nobody here knows how long a head is

    def begin(self, local: Local) -> Vector:
        return self.personal(local.start, local.client)

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        head, delta = local.model.part("head"), local.start - theta
        delta[head] = 0
        return {"delta": delta}, {"head": theta[head]}

    def personal(self, theta: Vector, client: State) -> Vector:
        head = client["head"]
        return torch.cat([theta[: len(theta) - len(head)], head.to(theta.device)])
