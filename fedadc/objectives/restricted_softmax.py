"""Restricted softmax, the loss of FedRS (Li and Zhan, KDD 2021).

Local training pushes down the logits of classes that a client lacks, having nothing to push them up. Scaled by alpha
they move less. Evaluation is unscaled. The authors' code scales softly, by how frequent a class is (`soft`), and its
classifier has no bias; here the whole logit is scaled, bias included.
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
    """Cross-entropy with the logits of classes that the client lacks scaled down."""

    alpha: float = 0.5  # α, the scale of a class without samples; 1: cross-entropy
    soft: bool = False  # scale every class by its share of the client's data

    paper: ClassVar[str] = "Li and Zhan, KDD 2021"

    def __post_init__(self) -> None:
        require(0 <= self.alpha <= 1, f"restricted_softmax: alpha must lie in [0, 1], not {self.alpha}.")

    def __call__(self, model: FlatModel, batch: Batch, local: Local) -> Tensor:
        logits = model(batch.x)
        counts = local.class_counts.to(logits.dtype)
        held = counts / counts.max() if self.soft else counts.clamp(max=1)
        return F.cross_entropy(logits * (self.alpha + (1 - self.alpha) * held), batch.y)
