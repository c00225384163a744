"""Learning-rate schedules over rounds: one file per schedule, and their table by config name."""

from fedadc.schedules.base import Constant, Schedule
from fedadc.schedules.cosine import Cosine
from fedadc.schedules.exponential import Exponential
from fedadc.schedules.step import Step

SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "step": Step,
    "cosine": Cosine,
    "exponential": Exponential,
}

__all__ = ["SCHEDULES", "Constant", "Cosine", "Exponential", "Schedule", "Step"]
