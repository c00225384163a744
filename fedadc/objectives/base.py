"""What a client minimizes. An objective is a frozen dataclass that is called; any method takes any objective.

`__call__(model, batch, local)` returns the mean loss of a batch. `model` holds the present theta, `batch` has
`x`, `y` and `position` (of its samples in the client's own data), `local` is all that a client can see. Gradients flow
through `model(x)` or `model.head(model.embed(x))`; `model.theta` is a plain vector without one, so a term in theta
itself, such as a proximal one, is a method's `correct`. What a frozen model says belongs in `local.per_sample`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedadc.data.batches import Batch
from fedadc.errors import FedadcError, require
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import State
from fedadc.views.local import Local
from fedadc.views.round_info import RoundInfo
from fedadc.views.setup import Setup

ENSEMBLES = ("swa", "ema", "lookahead")  # averages over rounds that a server may keep (`federation/ensembling.py`)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Base of all objectives; subclass it and write `__call__`."""

    paper: ClassVar[str] = ""
    computation: ClassVar[str] = ""  # beyond cross-entropy's, in words

    @property
    def downlink(self) -> tuple[str, ...]:
        """Names of the server vectors that it needs beside theta."""
        return ()

    @property
    def asks_the_global_model(self) -> bool:
        """Whether it compares the client's model with the one received; senseless where none is."""
        return False

    def check(self, setup: Setup) -> None:
        """Refuse, with a FedadcError that says why, a federation in which this objective makes no sense."""

    def __call__(self, model: FlatModel, batch: Batch, local: Local) -> Tensor:
        raise FedadcError(f"objective {type(self).__name__} must define __call__(model, batch, local).")

    # Optional: `derivative(logits, batch, local)` returns the loss and its derivative with respect to the logits, for a
    # loss that depends on model(batch.x) alone and whose closed form is simple. It stands in for __call__ and autograd.
    derivative: ClassVar[Callable[..., tuple[Tensor, Tensor]] | None] = None

    def __init_subclass__(cls) -> None:
        for ancestor in cls.__mro__:
            if "derivative" in vars(ancestor):
                return
            if "__call__" in vars(ancestor):  # another loss: the closed form of those further up is not its own
                cls.derivative = None
                return

    # What it keeps at the client, beside the method's own state: created on first use, renewed after every round.
    def client_state(self, theta: Tensor) -> State:
        return {}

    def remember(self, theta: Tensor, local: Local) -> State:
        """The new state of a client that has arrived at theta; it takes effect only if the upload is counted."""
        return {name: local.client[name] for name in self.client_state(local.start)}

    # What it keeps at the server, beside the method's own state.
    def server_state(self, theta: Tensor) -> State:
        return {}

    def follow(self, theta: Tensor, server: State, info: RoundInfo) -> State:
        """Its new server state once theta is the global model."""
        return {name: server[name] for name in self.server_state(theta)}


def require_weight(name: str, value: float) -> None:
    require(0 <= value < float("inf"), f"{name} must not be negative, not {value}.")


def require_teacher(name: str, value: str, others: tuple[str, ...]) -> None:
    known = (*others, *ENSEMBLES)
    require(value in known, f"{name} must be one of {', '.join(known)}, not {value!r}.")


def require_temperature(name: str, value: float) -> None:
    require(1e-3 <= value <= 1e3, f"{name} must lie between 0.001 and 1000, not {value}.")
