"""Metrics of models on data that is not for training."""

from fedadc.evaluation.metrics import Evaluation

__all__ = ["Evaluation"]
