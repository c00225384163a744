"""A method: how a client moves, and what the server does with the mean of the uploads. The defaults are FedAvg.

A method is a frozen dataclass of hyper-parameters and holds no tensors; all state passes through as values.
`step` may overwrite `theta` and the gradient it was given (the next call of `grad` does), never `local.start`,
`local.server` or `local.client`; `grad(point)` leaves theta where it is. `update` returns new tensors and overwrites
nothing: states of earlier rounds live on. delta = start - end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

from fedadc.errors import require
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import State, Vector
from fedadc.objectives import CrossEntropy, Objective
from fedadc.views.local import Local
from fedadc.views.round_info import RoundInfo
from fedadc.views.setup import Setup

Gradient = Callable[[Vector], Vector]  # point -> the gradient there; gone at the next call, so clone what you keep


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of all methods; subclass it and write what differs from FedAvg."""

    objective: Objective = field(default_factory=CrossEntropy, metadata={"config": False})

    paper: ClassVar[str] = ""
    computation: ClassVar[str] = ""  # beyond FedAvg's, in words
    downlink: ClassVar[tuple[str, ...]] = ()  # names of the server vectors sent along with theta
    tracked: ClassVar[tuple[str, ...]] = ()  # uploads of which `mean` has the plain sum / N, never weighted
    travels: ClassVar[str] = "all"  # the part of theta that is sent, up and down: "all" or "embed", the body
    federated: ClassVar[bool] = True  # False: nothing travels, and the clients' own models are what is evaluated
    personalized: ClassVar[bool] = False  # True: clients have models of their own, evaluated on their own test shares
    refused: ClassVar[Mapping[str, str]] = {}  # keys that users try, and why they do not exist

    @property
    def headless(self) -> bool:
        """Whether only clients have a trained head: theta's is the initial one, so theta is a body and no model."""
        return self.personalized and self.travels == "embed"

    def complete(self) -> Self:
        """With settings filled in that follow from others, as a run's config shows them."""
        return self

    def check(self, setup: Setup) -> None:
        """Refuse, with a FedadcError that says why, settings that make no sense for this method."""

    # at the client
    def client_state(self, theta: Vector) -> State:
        """The state of a client that is selected for the first time; {} for a stateless one."""
        return {}

    def begin(self, local: Local) -> Vector:
        """Where a client starts."""
        return local.start

    def trained(self, local: Local) -> slice:
        """The part of theta that a step moves: `local.clip` is for its gradient, and `correct` sees to the rest."""
        return slice(None)

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        """What a method makes of the gradient at theta, clipped and decayed."""
        return g

    def step(self, theta: Vector, grad: Gradient, local: Local) -> Vector:
        """One local step (Algorithm 1, lines 6 and 7)."""
        return theta.sub_(grad(theta), alpha=local.lr)

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        """The upload, and the client's new state, which takes effect only if the upload is counted."""
        return {"delta": local.start - theta}, local.client

    # at the server
    def server_state(self, theta: Vector) -> State:
        return {}

    def update(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        """The new theta and server state from the mean upload (Algorithm 1, line 9)."""
        return theta - mean["delta"], server

    # what is evaluated
    def evaluated(self, theta: Vector, server: State) -> dict[str, Vector]:
        """Its models by name. A run is judged by the first; the others' metrics stand beside it under their names."""
        return {"global": theta}

    def personal(self, theta: Vector, client: State) -> Vector:
        """A client's own model, from the global one and its state."""
        return theta


def require_body(model: FlatModel, name: str) -> None:
    """Refuse a model without a split into body and head, and one that is a head alone."""
    body = model.part("embed")
    require(
        body.stop > 0,
        f"method {name} shares the body of a model, but {type(model.module).__name__} has no parameters "
        "before its head; choose another model.",
    )


def require_beta(name: str, value: float) -> None:
    require(0 <= value < 1, f"{name} must lie in [0, 1), not {value}.")


def require_server_lr(value: float) -> None:
    require(0 < value < float("inf"), f"server_lr must be positive, not {value}.")
