"""Metrics of models on data that is not for training."""

from fedadc.evaluation.metrics import Evaluation
from fedadc.evaluation.stopping import Stopping

__all__ = ["Evaluation", "Stopping"]
