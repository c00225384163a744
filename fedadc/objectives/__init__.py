"""The table of objectives (the losses that clients minimize) by config name."""

from __future__ import annotations

from fedadc.objectives.base import Objective
from fedadc.objectives.cross_entropy import CrossEntropy
from fedadc.objectives.global_distillation import GlobalDistillation
from fedadc.objectives.model_contrast import ModelContrast
from fedadc.objectives.not_true_distillation import NotTrueDistillation
from fedadc.objectives.restricted_softmax import RestrictedSoftmax
from fedadc.objectives.self_confidence import SelfConfidence
from fedadc.objectives.squared_error import SquaredError

OBJECTIVES: dict[str, type[Objective]] = {
    "cross_entropy": CrossEntropy,
    "self_confidence": SelfConfidence,
    "restricted_softmax": RestrictedSoftmax,
    "not_true_distillation": NotTrueDistillation,
    "global_distillation": GlobalDistillation,
    "model_contrast": ModelContrast,
    "squared_error": SquaredError,
}
DEFAULT_OBJECTIVES = {"classification": "cross_entropy", "regression": "squared_error"}  # by the name of the task


def default_objective(task: str) -> Objective:
    """The loss of a task, with its default settings."""
    return OBJECTIVES[DEFAULT_OBJECTIVES[task]]()


__all__ = [
    "DEFAULT_OBJECTIVES",
    "OBJECTIVES",
    "CrossEntropy",
    "GlobalDistillation",
    "ModelContrast",
    "NotTrueDistillation",
    "Objective",
    "RestrictedSoftmax",
    "SelfConfidence",
    "SquaredError",
    "default_objective",
]
