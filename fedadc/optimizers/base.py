"""The base class of local optimizers. An optimizer holds settings; what it remembers is a `Stepper`'s.

A method steps against a direction, theta - lr * direction. The direction of plain SGD is the gradient itself, after the
method's correction; an optimizer may return another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedadc.fields.settings import Settings

State = dict[str, Tensor]


class Stepper:
    """Turns the gradients of one client's round into directions. This one returns them as they are."""

    def __call__(self, g: Tensor) -> Tensor:
        """The direction of a step; it may overwrite the gradient.

        Several gradients of one step all start from what was remembered before the step.
        """
        return g

    def next_step(self) -> None:
        """Called after every step."""

    def state(self) -> State:
        """What the client keeps for its next round."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Optimizer(Settings):
    """The base class of local optimizers; subclass it and write `stepper`."""

    decoupled: ClassVar[bool] = False  # weight decay is added to the direction, not to the gradient

    @property
    def plain(self) -> bool:
        """True if steps are those of SGD, for which all methods are derived."""
        return False

    def client_state(self, theta: Tensor) -> State:
        """What a client keeps that is selected for the first time; {} if it keeps nothing between rounds."""
        return {}

    def stepper(self, theta: Tensor, client: State) -> Stepper:
        """What makes the directions of a round, from what the client has kept."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Steps against the gradient, or against `local.momentum`."""

    @property
    def plain(self) -> bool:
        """True: these are the steps of SGD."""
        return True

    def stepper(self, theta: Tensor, client: State) -> Stepper:
        """Gradients stay as they are."""
        return Stepper()
