"""Not-true distillation, the loss of FedNTD (Lee et al., NeurIPS 2022).

L = CE + beta tau² KL(teacher || student), with softmax over the C - 1 logits of the classes that are not the label. The
teacher is the received global model: the client learns its own labels without forgetting the other classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedadc.data.batches import Batch
from fedadc.models.flat import FlatModel
from fedadc.objectives.base import Objective, require_temperature, require_weight
from fedadc.views.local import Local


@dataclass(frozen=True, kw_only=True)
class NotTrueDistillation(Objective):
    """Cross-entropy, plus distillation from the global model on the classes that are not the label."""

    beta: float = 0.3  # β, the weight of the distillation
    tau: float = 1.0  # τ, the temperature of student and teacher

    task: ClassVar[str] = "classification"
    paper: ClassVar[str] = "Lee et al., NeurIPS 2022"
    computation: ClassVar[str] = "1 forward pass / round"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("beta", self.beta)
        require_temperature("tau", self.tau)

    @property
    def asks_the_global_model(self) -> bool:
        return self.beta > 0

    def __call__(self, model: FlatModel, batch: Batch, local: Local) -> Tensor:
        logits = model(batch.x)
        cross_entropy = F.cross_entropy(logits, batch.y)
        if self.beta == 0:
            return cross_entropy
        teacher = local.per_sample("teacher", batch, lambda b: model.predict(local.start, b.x))
        true = F.one_hot(batch.y, logits.shape[1]).bool()
        p = (teacher / self.tau).masked_fill(true, float("-inf")).softmax(dim=1)
        log_q = (logits / self.tau).masked_fill(true, float("-inf")).log_softmax(dim=1)
        kl = F.kl_div(log_q.masked_fill(true, 0), p, reduction="batchmean")  # p is 0 at the label, and 0 · -inf is NaN
        return cross_entropy + self.beta * self.tau**2 * kl
