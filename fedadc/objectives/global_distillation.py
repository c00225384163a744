"""Global knowledge distillation, the loss of FedGKD (Yao et al., 2021).

L = CE + lam tau² KL(teacher || student). The teacher is the parameter average of the last `window` global models,
including the received one; in early rounds, of those that exist. With window = 1 the teacher is the received model.
With a larger window, or another ensemble as teacher, the server also sends the teacher, which doubles the downlink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedadc.data.batches import Batch
from fedadc.errors import require
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import State
from fedadc.objectives.base import Objective, require_temperature, require_weight
from fedadc.views.local import Local
from fedadc.views.round_info import RoundInfo


@dataclass(frozen=True, kw_only=True)
class GlobalDistillation(Objective):
    """Cross-entropy, plus distillation from the average of the last global models."""

    lam: float = 0.1  # λ, the weight of the distillation
    tau: float = 0.5  # the temperature of student and teacher
    window: int = 1  # M, the number of global models in the teacher
    teacher: Literal["window", "swa", "ema", "lookahead"] = "window"  # or an ensemble of the run

    task: ClassVar[str] = "classification"
    paper: ClassVar[str] = "Yao et al., 2021"
    computation: ClassVar[str] = "1 forward pass / round (down ×2 if window > 1 or an ensemble teaches)"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("lam", self.lam)
        require_temperature("tau", self.tau)
        require(1 <= self.window <= 1000, f"window must be between 1 and 1000, not {self.window}.")
        require(
            self.window == 1 or self.teacher == "window",
            f"window is {self.window}, but teacher is {self.teacher}; set only one of the two.",
        )

    @property
    def downlink(self) -> tuple[str, ...]:
        if self.teacher != "window":
            return (self.teacher,)
        return ("teacher",) if self.window > 1 else ()

    @property
    def asks_the_global_model(self) -> bool:
        return self.lam > 0

    def __call__(self, model: FlatModel, batch: Batch, local: Local) -> Tensor:
        logits = model(batch.x)
        cross_entropy = F.cross_entropy(logits, batch.y)
        if self.lam == 0:
            return cross_entropy
        frozen = local.server[self.downlink[0]] if self.downlink else local.start
        teacher = local.per_sample("teacher", batch, lambda b: model.predict(frozen, b.x))
        log_q, p = F.log_softmax(logits / self.tau, dim=1), F.softmax(teacher / self.tau, dim=1)
        return cross_entropy + self.lam * self.tau**2 * F.kl_div(log_q, p, reduction="batchmean")

    def server_state(self, theta: Tensor) -> State:
        return {"recent": theta[None].clone(), "teacher": theta.clone()} if self.window > 1 else {}

    def follow(self, theta: Tensor, server: State, info: RoundInfo) -> State:
        if self.window == 1:
            return {}
        recent = torch.cat([theta[None], server["recent"]])[: self.window]  # newest first
        return {"recent": recent, "teacher": recent.mean(dim=0)}
