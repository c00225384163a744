"""FedProx (Li et al., MLSys 2020): a client minimizes f_k(theta) + mu/2 ||theta - theta_t||² (its eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedadc.errors import require
from fedadc.methods.base import Method
from fedadc.models.vectors import Vector
from fedadc.views.local import Local


@dataclass(frozen=True, kw_only=True)
class FedProx(Method):
    """FedAvg with a proximal term that pulls clients toward the received model."""

    mu: float = 0.01  # μ

    paper: ClassVar[str] = "Li et al., MLSys 2020"
    computation: ClassVar[str] = "2 vector operations / step"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.mu < float("inf"), f"mu must be at least 0 and finite, not {self.mu}.")

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        return g.add_(theta - local.start, alpha=self.mu)
