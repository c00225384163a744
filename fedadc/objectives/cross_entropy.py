"""Cross-entropy, the default objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedadc.data.batches import Batch
from fedadc.models.flat import FlatModel
from fedadc.objectives.base import Objective
from fedadc.views.local import Local


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Objective):
    """The cross-entropy of the labels."""

    task: ClassVar[str] = "classification"

    def __call__(self, model: FlatModel, batch: Batch, local: Local) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    def derivative(self, logits: Tensor, batch: Batch, local: Local) -> tuple[Tensor, Tensor]:
        """The loss and its derivative (p - true) / n."""
        true = F.one_hot(batch.y, logits.shape[1])
        return F.cross_entropy(logits, batch.y), logits.softmax(dim=1).sub_(true).div_(len(logits))
