"""THE inner loop: what one client does in one round. It sees its own data, what it received, and nothing else.

The order of operations, once for all methods: loss gradient at the point where it is taken -> clip -> + weight decay
× that point -> the method's correction -> local momentum -> the method's step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedadc.data.batches import Augment, Batch, ClientData, Inputs, count_steps, shuffled
from fedadc.data.dataset import Array, Clients, Samples
from fedadc.errors import require
from fedadc.federation.schedule import Constant, Schedule
from fedadc.methods.base import Method, State, Vector
from fedadc.models.flat import FlatModel
from fedadc.objectives import confidence
from fedadc.rng import generator, torch_seeded

MOST = 10**9  # rounds, steps, samples: more than anybody means
TEACHER_BATCH = 256  # a frozen model's pass over a client's data is cut here; part of the result's bits


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """What every client does whatever the method."""

    steps: int | None = None  # H, exactly; or
    epochs: int | None = None  # passes over the client's own data (1 if neither is given)
    batch_size: int = 32
    lr: float = 0.1  # η of the first round; a schedule changes it from round to round
    weight_decay: float = 0.0  # coupled: added to the gradient
    momentum: float = 0.0  # v = momentum * v + g, from zero in every client's round
    clip: float | None = None  # the largest norm of the loss gradient
    schedule: Schedule = field(default_factory=Constant)

    def __post_init__(self) -> None:
        require(
            self.steps is None or self.epochs is None,
            "give local.steps or local.epochs, not both (null switches one off).",
        )
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "epochs", 1)
        for name in ("steps", "epochs", "batch_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"local.{name} must be at least 1, not {value}.")
            require(value is None or value <= MOST, f"local.{name} must be at most {MOST}, not {value}.")
        require(0 < self.lr <= 1e30, f"local.lr must be positive and at most 1e30, not {self.lr}.")
        require(
            0 <= self.weight_decay < float("inf"), f"local.weight_decay must not be negative, not {self.weight_decay}."
        )
        require(0 <= self.momentum < 1, f"local.momentum must lie in [0, 1), not {self.momentum}.")
        require(self.clip is None or self.clip > 0, f"local.clip must be positive, not {self.clip}.")

    def lr_of(self, round: int, rounds: int) -> float:
        """η_t of round t of a run of so many rounds."""
        return self.lr * self.schedule(round, rounds)


@dataclass(frozen=True)
class Order:
    """What a client receives."""

    round: int
    client: int
    lr: float
    theta: Vector
    server: State  # the downlink vectors
    state: State  # the client's own, from its last counted round


@dataclass(frozen=True)
class Report:
    """What a client answers. Only `upload` travels; `state` stays with the client."""

    client: int
    upload: State
    state: State
    loss: float  # mean over its steps
    samples: int
    steps: int


@dataclass
class Local:
    """All that a client can see during its round."""

    model: FlatModel
    data: ClientData
    start: Vector  # theta_t, as received
    server: State  # the downlink vectors
    client: State  # its own state
    lr: float  # η_t
    steps: int  # H, its own
    rng: Callable[[str], np.random.Generator]  # purpose -> a generator of this round and client
    step: int = 0  # τ - 1, the present one
    scratch: dict[str, Vector] = field(default_factory=dict)  # a method's own, gone after the round
    _frozen: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def class_counts(self) -> Tensor:
        return self.data.class_counts()

    @cached_property
    def confidence(self) -> Tensor:
        """rho, from the client's own label counts (section III)."""
        return confidence(self.class_counts, self.model.dtype)

    def frozen(self, theta: Vector, batch: Batch) -> Tensor:
        """Logits of a frozen model for a batch.

        Where nothing random changes the inputs they come from one pass over the client's data in index order, made
        when first asked for: a teacher then costs one forward pass a round, whatever the number of epochs.
        """
        if self.data.augment:
            return self.model.predict(theta, batch.x)
        if id(theta) not in self._frozen:
            self._frozen[id(theta)] = torch.cat(
                [self.model.predict(theta, x) for x in self.data.in_order(TEACHER_BATCH)]
            )
        return self._frozen[id(theta)][torch.from_numpy(batch.position).to(self.model.device)]


@dataclass(frozen=True)
class Workplace:
    """What is the same for all clients of a run: where and how they train."""

    model: FlatModel
    method: Method
    work: LocalWork
    train: Samples
    clients: Clients
    classes: int
    inputs: Inputs
    augment: Augment
    seed: int

    def steps(self, cohort: Array) -> Array:
        """H of each client of a cohort."""
        sizes = self.clients.offsets[cohort + 1] - self.clients.offsets[cohort]
        return count_steps(sizes, self.work.batch_size, self.work.steps, self.work.epochs)

    def data(self, client: int) -> ClientData:
        return ClientData(self.train, self.clients[client], self.classes, self.inputs, self.augment)


def local_update(place: Workplace, order: Order) -> Report:
    """Train one client from what it received."""
    model, method, work, data = place.model, place.method, place.work, place.data(order.client)

    def rng(purpose: str) -> np.random.Generator:
        return generator(place.seed, purpose, order.round, order.client)

    steps = int(place.steps(np.array([order.client]))[0])
    local = Local(model, data, order.theta, order.server, order.state, order.lr, steps, rng)
    positions = shuffled(len(data), work.batch_size, work.steps, work.epochs, rng("batches"))
    velocity = torch.zeros_like(model.theta) if work.momentum else None
    losses: list[Tensor] = []

    with torch_seeded(place.seed, "dropout", order.round, order.client):
        theta = model.theta.copy_(method.begin(local))
        for local.step, batch in enumerate(data.batches(positions, rng("augment"))):

            def grad(theta: Vector, batch: Batch = batch) -> Vector:
                g, loss = model.gradient_of(lambda: method.objective(model, batch, local), theta)
                losses.append(loss)
                if work.clip is not None:
                    g.mul_((work.clip / torch.linalg.vector_norm(g)).clamp(max=1))
                if work.weight_decay:
                    g.add_(theta, alpha=work.weight_decay)
                g = method.correct(g, theta, local)
                if velocity is not None:
                    g.copy_(velocity.mul_(work.momentum).add_(g))  # a copy: the step may overwrite g
                return g

            theta = method.step(theta, grad, local)
        upload, state = method.finish(theta, local)
    mean_loss = float(torch.stack(losses).mean()) if losses else float("nan")
    return Report(order.client, upload, state, mean_loss, len(data), steps)
