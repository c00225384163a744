"""FedRep (Collins et al., ICML 2021, Algorithm 1): a client first trains its head, then the body.

It is FedPer with one part trained after the other. `head_share` is the share of a client's steps that train the head;
at least one step trains the body. The authors' code counts epochs instead, and ends with a round in which all clients
train their heads for at least 10 epochs; here all rounds are alike.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

from fedadc.errors import require
from fedadc.methods.base import Gradient
from fedadc.methods.fedper import FedPer
from fedadc.models.vectors import Vector
from fedadc.views.local import Local
from fedadc.views.setup import Setup

log = logging.getLogger("fedadc")


@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    """A shared body and a head of each client's own; the head is trained first."""

    head_share: float = 0.9  # the share of a client's steps that train the head

    paper: ClassVar[str] = "Collins et al., ICML 2021"
    sgd_only: ClassVar[str] = "its steps train one part of the model after the other, but an optimizer counts all steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.head_share < 1, f"head_share must be in [0, 1), not {self.head_share}.")

    def check(self, setup: Setup) -> None:
        super().check(setup)
        steps = setup.local.count_steps(setup.client_sizes)
        one_step = int((steps < 2).sum()) if self.head_share else 0
        require(
            one_step < len(steps),
            "method fedrep trains the body in the last local step, so with one local step per round no head would ever "
            "be trained; raise local.epochs or local.steps, or lower local.batch_size.",
        )
        if one_step:
            log.warning("method fedrep: %d clients do one local step per round; their heads stay untrained", one_step)

    def trained(self, local: Local) -> slice:
        return local.model.part("head" if self._trains_head(local) else "embed")

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        g[local.model.part("embed" if self._trains_head(local) else "head")] = 0  # so no momentum accumulates there
        return g

    def step(self, theta: Vector, grad: Gradient, local: Local) -> Vector:
        part, g = self.trained(local), grad(theta)
        theta[part].sub_(g[part], alpha=local.lr)  # only this part: in the body's steps g still has the head's momentum
        return theta

    def _trains_head(self, local: Local) -> bool:
        """True if the current step trains the head, False if it trains the body."""
        return local.step < min(round(self.head_share * local.steps), local.steps - 1)
