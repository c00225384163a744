"""Run directories: written during training, resumed after an interruption, read afterwards."""

from fedadc.runs.checkpoint import Checkpoints
from fedadc.runs.runner import RunResult, resume, run

__all__ = ["Checkpoints", "RunResult", "resume", "run"]
