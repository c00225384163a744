"""The base class of all objectives: the loss that a client minimizes. Objectives and methods combine freely.

An objective is a frozen dataclass. `__call__(model, batch, local)` returns the mean loss of a batch: `model` is at the
current theta, `batch` has `x`, `y` and `position` (the positions of its samples in the client's own data), and `local`
is everything that a client can see. Gradients flow through `model(x)` or `model.head(model.embed(x))`. `model.theta` is
a plain vector without a gradient, so a term in theta itself, such as a proximal term, belongs in a method's `correct`.
Predictions of a frozen teacher belong in `local.per_sample`, which caches them for the round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedadc.data.batches import Batch
from fedadc.errors import FedadcError, require
from fedadc.fields.settings import Settings
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import State
from fedadc.views.local import Local
from fedadc.views.round_info import RoundInfo
from fedadc.views.setup import Setup

ENSEMBLES = ("swa", "ema", "lookahead")  # averages of global models that the server may keep (training/ensembles.py)


@dataclass(frozen=True, kw_only=True)
class Objective(Settings):
    """The base class of all objectives; subclass it and write `__call__`."""

    paper: ClassVar[str] = ""
    task: ClassVar[str] = ""  # the name of the task whose labels it needs; empty: any
    computation: ClassVar[str] = ""  # the extra work compared with cross-entropy, in words

    @property
    def downlink(self) -> tuple[str, ...]:
        """Names of the server vectors that clients need beside theta."""
        return ()

    @property
    def asks_the_global_model(self) -> bool:
        """True if the loss uses the received global model; methods without a complete global model refuse it."""
        return False

    def check(self, setup: Setup) -> None:
        """Raise a FedadcError that says why if the settings of a run do not fit this objective."""

    def __call__(self, model: FlatModel, batch: Batch, local: Local) -> Tensor:
        raise FedadcError(f"objective {type(self).__name__} must define __call__(model, batch, local).")

    # Optional: `derivative(logits, batch, local)` returns the loss and its derivative with respect to the logits. It
    # replaces __call__ and autograd for a loss that depends on model(batch.x) only and has a simple closed form.
    derivative: ClassVar[Callable[..., tuple[Tensor, Tensor]] | None] = None

    def __init_subclass__(cls) -> None:
        for ancestor in cls.__mro__:
            if "derivative" in vars(ancestor):
                return
            if "__call__" in vars(ancestor):  # a new loss: an inherited closed form belongs to another one
                cls.derivative = None
                return

    # State that the objective keeps at the client, beside the method's: created on first use, new after every round.
    def client_state(self, theta: Tensor) -> State:
        return {}

    def remember(self, theta: Tensor, local: Local) -> State:
        """The new state of a client that ended at theta; it takes effect only if the server counts the upload."""
        return {name: local.client[name] for name in self.client_state(local.start)}

    # State that the objective keeps at the server, beside the method's.
    def server_state(self, theta: Tensor) -> State:
        return {}

    def follow(self, theta: Tensor, server: State, info: RoundInfo) -> State:
        """The new server state after a round; theta is the new global model."""
        return {name: server[name] for name in self.server_state(theta)}


def require_weight(name: str, value: float) -> None:
    require(0 <= value < float("inf"), f"{name} must be at least 0 and finite, not {value}.")


def require_temperature(name: str, value: float) -> None:
    require(1e-3 <= value <= 1e3, f"{name} must be between 0.001 and 1000, not {value}.")
