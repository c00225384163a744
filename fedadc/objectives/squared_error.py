"""Squared error, the default objective of regressions.

L is the mean, over the samples and targets of a batch, of (output - label)², with scaled labels.
"""

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
class SquaredError(Objective):
    """The mean squared error of the scaled labels."""

    task: ClassVar[str] = "regression"

    def __call__(self, model: FlatModel, batch: Batch, local: Local) -> Tensor:
        return F.mse_loss(model(batch.x), batch.y)

    def derivative(self, outputs: Tensor, batch: Batch, local: Local) -> tuple[Tensor, Tensor]:
        """The loss and its derivative 2 (output - label) / n, where n counts samples times targets."""
        return F.mse_loss(outputs, batch.y), (outputs - batch.y).mul_(2 / outputs.numel())
