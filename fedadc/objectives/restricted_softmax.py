"""Restricted softmax, the loss of FedRS (Li and Zhan, KDD 2021).

Local training only pushes down the logits of classes that a client does not have. Scaled by alpha, these logits change
less. Evaluation does not scale. The authors' code scales each class by its frequency (`soft`), and its classifier has
no bias; here the whole logit is scaled, including the bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedadc.data.batches import Batch
from fedadc.errors import require
from fedadc.models.flat import FlatModel
from fedadc.objectives.base import Objective
from fedadc.views.local import Local


@dataclass(frozen=True, kw_only=True)
class RestrictedSoftmax(Objective):
    """Cross-entropy that scales down the logits of classes that the client does not have."""

    alpha: float = 0.5  # α, the scale of a class without samples; 1: plain cross-entropy
    soft: bool = False  # scale every class by its frequency in the client's data

    task: ClassVar[str] = "classification"
    paper: ClassVar[str] = "Li and Zhan, KDD 2021"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.alpha <= 1, f"alpha must be in [0, 1], not {self.alpha}.")

    def __call__(self, model: FlatModel, batch: Batch, local: Local) -> Tensor:
        logits = model(batch.x)
        counts = local.class_counts.to(logits.dtype)
        presence = counts / counts.max() if self.soft else counts.clamp(max=1)
        return F.cross_entropy(logits * (self.alpha + (1 - self.alpha) * presence), batch.y)
