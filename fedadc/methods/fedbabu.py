"""FedBABU (Oh et al., ICLR 2022): only the body is trained; the head keeps its initial values at server and clients.

The global model (trained body, initial head) is a complete classifier, and a run is judged by it. Clients fine-tune it
after federated training.
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
    """FedAvg of the body alone; the head is never trained."""

    paper: ClassVar[str] = "Oh et al., ICLR 2022"
    travels: ClassVar[str] = "embed"

    def check(self, setup: Setup) -> None:
        require_body(setup.model, "fedbabu")

    def trained(self, local: Local) -> slice:
        return local.model.part("embed")

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        g[local.model.part("head")] = 0  # weight decay has added a term there
        return g
