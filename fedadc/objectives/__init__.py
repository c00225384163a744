"""The table of objectives (the losses that clients minimize) by config name."""

from __future__ import annotations

from fedadc.objectives.base import Objective
from fedadc.objectives.cross_entropy import CrossEntropy
from fedadc.objectives.global_distillation import GlobalDistillation
from fedadc.objectives.model_contrast import ModelContrast
from fedadc.objectives.not_true_distillation import NotTrueDistillation
from fedadc.objectives.restricted_softmax import RestrictedSoftmax
from fedadc.objectives.self_confidence import SelfConfidence

OBJECTIVES: dict[str, type[Objective]] = {
    "cross_entropy": CrossEntropy,
    "self_confidence": SelfConfidence,
    "restricted_softmax": RestrictedSoftmax,
    "not_true_distillation": NotTrueDistillation,
    "global_distillation": GlobalDistillation,
    "model_contrast": ModelContrast,
}

__all__ = [
    "OBJECTIVES",
    "CrossEntropy",
    "GlobalDistillation",
    "ModelContrast",
    "NotTrueDistillation",
    "Objective",
    "RestrictedSoftmax",
    "SelfConfidence",
]
