"""Self-confidence knowledge distillation, the loss of FedADC+ (section III of the FedADC paper).

L = (1 - lam) CE + lam KL(target || student). The target is the teacher's prediction, with the probability of classes
that the client knows well (rho near 1) moved to the true label. Deviations: docs/deviations.md, 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedadc.data.batches import Batch
from fedadc.errors import require
from fedadc.models.flat import FlatModel
from fedadc.objectives.base import ENSEMBLES, Objective, require_temperature
from fedadc.objectives.cross_entropy import CrossEntropy
from fedadc.views.local import Local


@dataclass(frozen=True, kw_only=True)
class SelfConfidence(Objective):
    """Distillation that trusts the teacher only on classes that are rare in the client's own data."""

    lam: float = 0.35  # λ
    tau: float = 1.0  # τ, the temperature of student and teacher
    teacher: Literal["received", "self", "swa", "ema", "lookahead"] = "received"  # or an ensemble of the run
    tau_squared: bool = False  # multiply the KL term by τ², as cs-kd does and the paper does not

    task: ClassVar[str] = "classification"
    paper: ClassVar[str] = "Ozfatura et al., FedADC"
    computation: ClassVar[str] = "1 forward pass / round"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.lam <= 1, f"lam must be in [0, 1], not {self.lam}.")
        require_temperature("tau", self.tau)

    @property
    def downlink(self) -> tuple[str, ...]:
        return (self.teacher,) if self.teacher in ENSEMBLES else ()

    @property
    def asks_the_global_model(self) -> bool:
        return self.teacher != "self" and self.lam > 0

    def __call__(self, model: FlatModel, batch: Batch, local: Local) -> Tensor:
        logits = model(batch.x)
        cross_entropy = F.cross_entropy(logits, batch.y)
        if self.lam == 0:
            return cross_entropy
        if self.teacher == "self":
            target = self._target(logits.detach(), batch, local)
        else:
            target = local.per_sample("target", batch, lambda b: self._received_target(b, local))
        kl = F.kl_div(F.log_softmax(logits / self.tau, dim=1), target, reduction="batchmean")
        scale = self.tau**2 if self.tau_squared else 1.0
        return (1 - self.lam) * cross_entropy + self.lam * scale * kl

    @property
    def derivative(self) -> Callable[..., tuple[Tensor, Tensor]] | None:  # type: ignore[override]
        if self.lam == 0:
            return CrossEntropy().derivative
        return self._mixture_derivative if self.tau == 1 and self.asks_the_global_model else None

    def _mixture_derivative(self, logits: Tensor, batch: Batch, local: Local) -> tuple[Tensor, Tensor]:
        """At τ = 1, L = cross-entropy with the mixture (1 - λ) true + λ target, minus λ times the target's entropy."""

        def mixture_and_entropy(b: Batch) -> Tensor:
            target = self._received_target(b, local)
            mixture = torch.lerp(F.one_hot(b.y, logits.shape[1]).to(target.dtype), target, self.lam)
            entropy = -self.lam * torch.xlogy(target, target).sum(dim=1, keepdim=True)
            return torch.cat([mixture, entropy], dim=1)

        rows = local.per_sample("mixture", batch, mixture_and_entropy)
        mixture, entropy = rows[:, :-1], rows[:, -1]
        loss = F.cross_entropy(logits, mixture) - entropy.mean()
        return loss, logits.softmax(dim=1).sub_(mixture).div_(len(logits))

    def _received_target(self, batch: Batch, local: Local) -> Tensor:
        teacher = local.server[self.teacher] if self.teacher in ENSEMBLES else local.start
        return self._target(local.model.predict(teacher, batch.x), batch, local)

    def _target(self, teacher: Tensor, batch: Batch, local: Local) -> Tensor:
        return confidence_target(teacher / self.tau, batch.y, confidence(local.class_counts, teacher.dtype))


def confidence_target(teacher_logits: Tensor, y: Tensor, rho: Tensor) -> Tensor:
    """The target probabilities of section III: p^_i = (1 - rho_i) p~_i, and the rest is added to the true class.

    p^_y is computed as p~_y + sum_{i != y} rho_i p~_i. This equals the paper's 1 - sum (1 - rho_i) p~_i, but all terms
    are non-negative: the subtraction can fall below zero in float32, which makes the KL divergence NaN.
    """
    p = teacher_logits.softmax(dim=1)
    true = F.one_hot(y, p.shape[1])
    moved = p * rho * (1 - true)  # from each other class to the true class
    return p - moved + true * moved.sum(dim=1, keepdim=True)


def confidence(class_counts: Tensor, dtype: torch.dtype) -> Tensor:
    """rho_i = gamma_i / gamma_max, from a client's own label counts (section III)."""
    counts = class_counts.to(dtype)
    return counts / counts.max()
