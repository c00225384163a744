"""FedBABU (Oh et al., ICLR 2022): the head stays as it was initialized, for good and everywhere; the body is trained.

The global model, body and initial head, is a classifier like any other and a run is judged by it. Clients fine-tune it
after the federated training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedadc.methods.base import Method, require_body
from fedadc.models.vectors import Vector
from fedadc.views.local import Local
from fedadc.views.setup import Setup


@dataclass(frozen=True, kw_only=True)
class FedBABU(Method):
    """FedAvg of the body alone, under a head that nobody trains."""

    paper: ClassVar[str] = "Oh et al., ICLR 2022"
    travels: ClassVar[str] = "embed"

    def check(self, setup: Setup) -> None:
        require_body(setup.model, "fedbabu")

    def trained(self, local: Local) -> slice:
        return local.model.part("embed")

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        g[local.model.part("head")] = 0  # also what weight decay has put there
        return g
