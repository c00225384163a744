"""How a client turns gradients into steps: one file per kind of optimizer, and their table by config name."""

from fedadc.optimizers.adam import Adam, AdamW
from fedadc.optimizers.base import SGD, Optimizer, Stepper

OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}

__all__ = ["OPTIMIZERS", "SGD", "Adam", "AdamW", "Optimizer", "Stepper"]
