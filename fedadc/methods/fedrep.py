"""FedRep (Collins et al., ICML 2021, Algorithm 1): the head's steps with the body fixed, then the body's.

As FedPer, with one part after the other. `head_share` is the head's share of a client's steps, whatever their number,
and at least one is the body's. The authors' code counts epochs instead, and ends with a round in which all clients
train their heads for at least 10 of them; here no round is special.
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
    """A shared body, a head of each client's own, the head trained first."""

    head_share: float = 0.9  # of a client's steps

    paper: ClassVar[str] = "Collins et al., ICML 2021"

    def __post_init__(self) -> None:
        require(0 <= self.head_share < 1, f"fedrep: head_share must lie in [0, 1), not {self.head_share}.")

    def check(self, setup: Setup) -> None:
        super().check(setup)
        steps = setup.local.count_steps(setup.client_sizes)
        few = int((steps < 2).sum()) if self.head_share else 0
        require(
            few < len(steps),
            "method fedrep trains the head, then the body: with one local step no head would ever be trained; raise "
            "local.epochs or local.steps, or lower local.batch_size.",
        )
        if few:
            log.warning("method fedrep: %d clients do one local step a round, so their heads are never trained", few)

    def trained(self, local: Local) -> slice:
        return local.model.part("head" if self._is_the_heads(local) else "embed")

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        g[local.model.part("embed" if self._is_the_heads(local) else "head")] = 0  # nor does momentum gather there
        return g

    def step(self, theta: Vector, grad: Gradient, local: Local) -> Vector:
        part, g = self.trained(local), grad(theta)
        theta[part].sub_(g[part], alpha=local.lr)  # the head's momentum is not zero in the body's steps
        return theta

    def _is_the_heads(self, local: Local) -> bool:
        """Whether the present step is."""
        return local.step < min(round(self.head_share * local.steps), local.steps - 1)
