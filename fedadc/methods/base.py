"""The base class of all methods: local steps at the client, the update at the server. The defaults are FedAvg.

A method is a frozen dataclass of hyper-parameters and holds no tensors: all state is passed in and returned. A client
uploads delta = start - end, where `start` is the received theta and `end` the theta after its last local step.

What may be overwritten: `step` may overwrite `theta` and the gradient that `grad` returned (the next call of `grad`
overwrites that gradient, too), but never `local.start`, `local.server` or `local.client`. `grad(point)` does not change
theta. `update` returns new tensors and overwrites nothing, because states of earlier rounds may still be in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

from fedadc.errors import require, require_new_names
from fedadc.fields.settings import Settings
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import State, Vector
from fedadc.objectives import CrossEntropy, Objective
from fedadc.views.local import Local
from fedadc.views.round_info import RoundInfo
from fedadc.views.setup import Setup

Gradient = Callable[[Vector], Vector]  # point -> the gradient at that point; the next call overwrites it: clone to keep


@dataclass(frozen=True, kw_only=True)
class Method(Settings):
    """The base class of all methods; subclass it and override what differs from FedAvg."""

    objective: Objective = field(default_factory=CrossEntropy, metadata={"config": False})

    paper: ClassVar[str] = ""
    computation: ClassVar[str] = ""  # the extra work compared with FedAvg, in words
    downlink: ClassVar[tuple[str, ...]] = ()  # names of the server vectors that are sent with theta
    tracked: ClassVar[tuple[str, ...]] = ()  # names of uploads for which `mean` holds the plain sum / N, never weighted
    numbers: ClassVar[tuple[str, ...]] = ()  # names of uploads of one number; they are averaged as delta is
    travels: ClassVar[str] = (
        "all"  # the part of theta that is sent, up and down: "all", "embed": the body, or "without_batch_norm"
    )
    federated: ClassVar[bool] = True  # False: nothing is sent, and the clients' own models are evaluated
    personalized: ClassVar[bool] = False  # True: each client has its own model, evaluated on its own test share
    sgd_only: ClassVar[str] = ""  # why local steps must be those of SGD; empty: any `local.optimizer` will do
    refused: ClassVar[Mapping[str, str]] = {}  # config keys that users may expect -> why there is no such key

    def __init_subclass__(cls) -> None:
        require_new_names(cls, "Method", {"personalised": "personalized"})  # an attribute of 0.1

    @property
    def needs_sizes(self) -> bool:
        """True if `local.mean_samples` is used: all clients must tell the server how many samples they have."""
        return False

    @property
    def headless(self) -> bool:
        """True if only the clients have all of a trained model: in theta, what is not sent keeps its initial values."""
        return self.personalized and self.travels != "all"

    def complete(self) -> Self:
        """A copy in which settings that default to other settings are filled in, as a run's config shows them."""
        return self

    def check(self, setup: Setup) -> None:
        """Raise a FedadcError that says why if the settings of a run do not fit this method."""

    # At the client.
    def client_state(self, theta: Vector) -> State:
        """The state of a client that is selected for the first time; {} if clients keep nothing."""
        return {}

    def begin(self, local: Local) -> Vector:
        """The theta from which a client starts its local steps."""
        return local.start

    def trained(self, local: Local) -> slice:
        """The slice of theta that this step trains: only its gradient is clipped; `correct` must zero the rest."""
        return slice(None)

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        """The corrected gradient; g is the loss gradient at theta after clipping and weight decay."""
        return g

    def step(self, theta: Vector, grad: Gradient, local: Local) -> Vector:
        """One local step (Algorithm 1, lines 6 and 7)."""
        return theta.sub_(grad(theta), alpha=local.lr)

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        """The upload and the client's new state, which takes effect only if the server counts the upload."""
        return {"delta": local.start - theta}, local.client

    # At the server.
    def server_state(self, theta: Vector) -> State:
        """The server's vectors beside theta, before the first round."""
        return {}

    def update(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        """The new theta and server state from the mean upload (Algorithm 1, line 9)."""
        return theta - mean["delta"], server

    def grown(self, theta: Vector, server: State, before: int, now: int) -> tuple[Vector, State]:
        """Theta and server state when clients have joined: N was `before`, and is `now`.

        Means over all clients become smaller, since a new client adds 0. These are the vectors that are tracked.
        """
        share = before / now
        return theta, {name: server[name] * share for name in self.tracked if name in server}

    # The models that are evaluated.
    def evaluated(self, theta: Vector, server: State) -> dict[str, Vector]:
        """The models to evaluate, by name. A run is judged by the first; metrics of the others carry their name."""
        return {"global": theta}

    def personal(self, theta: Vector, client: State) -> Vector:
        """A client's own model, from the global theta and the client's state."""
        return theta


def require_body(model: FlatModel, name: str) -> None:
    """Raise a FedadcError unless the model is split into `embed` and `head` and its body has parameters."""
    body = model.part("embed")
    require(
        body.stop > 0,
        f"method {name} shares the body of a model, but {type(model.module).__name__} has no parameters "
        "before its head; choose another model.",
    )


def require_beta(name: str, value: float) -> None:
    require(0 <= value < 1, f"{name} must be in [0, 1), not {value}.")


def require_server_lr(value: float) -> None:
    require(0 < value < float("inf"), f"server_lr must be positive and finite, not {value}.")
