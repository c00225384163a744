"""THE inner loop: what one client does in one round. It sees its own data, what it received, and nothing else.

The order of operations, once for all methods: loss gradient at the point where it is taken -> clip -> + weight decay
× that point -> the method's correction -> local momentum -> the method's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedadc.data.batches import Augment, Batch, ClientData, Inputs, count_samples, count_steps, shuffled
from fedadc.data.dataset import Array, Clients, Samples
from fedadc.errors import require
from fedadc.federation.faults import all_finite
from fedadc.federation.ledger import Bytes, sizes
from fedadc.federation.schedule import Constant, Schedule
from fedadc.federation.uplink import Full, Uplink
from fedadc.methods.base import Method, State, Vector, pair_of, state_of, vector_like
from fedadc.models.flat import FlatModel
from fedadc.objectives import Objective
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
class Broadcast:
    """What every client of a round receives."""

    round: int
    lr: float
    theta: Vector
    server: State  # the downlink vectors


@dataclass(frozen=True)
class Order:
    """What one client of a round is told."""

    client: int
    steps: int  # H, its own
    states: Mapping[int, State] = field(default_factory=dict)  # of all clients that have one
    weight: float = 1.0  # of its upload in the mean

    @property
    def state(self) -> State | None:
        """Its own, from its last counted round, read when it is needed; None: it has none yet."""
        return self.states.get(self.client)


@dataclass(frozen=True)
class Report:
    """What a client answers. Only `upload` travels; `state` stays with the client."""

    client: int
    upload: State
    state: State
    loss: float  # mean over its steps
    sent: Bytes  # by name, as it travelled
    steps: int
    weight: float
    finite: bool = True  # its upload and its state; if not, neither takes effect


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
    mean_samples: float  # of all clients: a number that the federation knows
    rng: Callable[[str], np.random.Generator]  # purpose -> a generator of this round and client
    step: int = 0  # τ - 1, the present one
    batch: Batch = field(init=False)  # of the present step
    scratch: dict[str, Vector] = field(default_factory=dict)  # a method's own, gone after the round
    touched: Array | None = None  # the positions of this round's samples, sorted; None: all
    _rows: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def class_counts(self) -> Tensor:
        return self.data.class_counts()

    def per_sample(self, name: str, batch: Batch, make: Callable[[Batch], Tensor]) -> Tensor:
        """What `make` gives for a batch, a row per sample, without gradients: a frozen teacher's word, for example.

        Where nothing random changes the inputs it is made once a round for all samples that the round touches, in index
        order, and kept under its name: a teacher costs one forward pass, whatever the number of epochs.
        """
        with torch.no_grad():
            if self.data.augment:
                return make(batch)
            if name not in self._rows:
                self._rows[name] = torch.cat([make(b) for b in self.data.in_order(self.touched, TEACHER_BATCH)])
        row = batch.position if self.touched is None else np.searchsorted(self.touched, batch.position)
        return self._rows[name].index_select(0, torch.from_numpy(row).to(self.model.device))


class Momentum:
    """Local momentum, v = mu * v + g, from zero in every client's round.

    A gradient that is asked for twice in a step goes on from the same v.
    """

    def __init__(self, mu: float, like: Vector) -> None:
        self.mu, self.asked = mu, False  # for a gradient in this step
        if mu:
            self.before, self.after = torch.zeros_like(like), torch.zeros_like(like)

    def __call__(self, g: Vector) -> Vector:
        if not self.mu:
            return g
        torch.add(g, self.before, alpha=self.mu, out=self.after)
        self.asked = True
        return g.copy_(self.after)  # a copy: the step may overwrite g

    def next_step(self) -> None:
        if self.asked:
            self.before, self.after, self.asked = self.after, self.before, False


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
    uplink: Uplink = field(default_factory=Full)

    def steps(self, cohort: Array) -> Array:
        """H of each client of a cohort."""
        return count_steps(self.clients.sizes_of(cohort), self.work.batch_size, self.work.steps, self.work.epochs)

    def samples(self, cohort: Array, steps: Array) -> int:
        """That a cohort uses in so many steps each."""
        work = self.work
        return int(count_samples(self.clients.sizes_of(cohort), work.batch_size, work.epochs, steps).sum())

    @property
    def mean_samples(self) -> float:
        return len(self.clients.indices) / len(self.clients)

    @property
    def travelling(self) -> slice:
        """The part of theta that is sent."""
        part = self.method.travels
        return slice(None) if part == "all" else self.model.part(part)

    def client_state(self, theta: Vector) -> State:
        """The state of a client that is selected for the first time: the method's, the objective's, the uplink's."""
        of_uplink = self.uplink.client_state(theta[self.travelling]) if self.method.federated else {}
        return {**self.method.client_state(theta), **self.method.objective.client_state(theta), **of_uplink}

    def data(self, client: int) -> ClientData:
        return ClientData(self.train, self.clients[client], self.classes, self.inputs, self.augment)


def local_update(place: Workplace, broadcast: Broadcast, order: Order) -> Report:
    """Train one client from what it received."""
    model, method, work = place.model, place.method, place.work
    local, positions = _arrive(place, broadcast, order)
    received = [local.start, *local.server.values(), *local.client.values()]
    versions = [v._version for v in received]
    name, momentum = type(method).__name__, Momentum(work.momentum, model.theta)
    losses: dict[int, Tensor] = {}  # of each step

    def grad(point: Vector) -> Vector:
        g, loss = _gradient(method.objective, point, local)
        losses.setdefault(local.step, loss)  # the first, where a method asks for several
        if work.clip is not None:
            g.mul_((work.clip / torch.linalg.vector_norm(g[method.trained(local)])).clamp(max=1))
        if work.weight_decay:
            g.add_(point, alpha=work.weight_decay)
        return momentum(vector_like(method.correct(g, point, local), g, f"{name}.correct"))

    with torch_seeded(place.seed, "dropout", broadcast.round, order.client):
        theta = model.theta
        theta.copy_(vector_like(method.begin(local), theta, f"{name}.begin"))
        for step, batch in enumerate(local.data.batches(positions, local.rng)):
            local.step, local.batch = step, batch
            moved = method.step(theta, grad, local)
            if moved is not theta:
                theta.copy_(vector_like(moved, theta, f"{name}.step"))
            momentum.next_step()
        upload, own = pair_of(method.finish(theta, local), f"{name}.finish")
        remembered = state_of(method.objective.remember(theta, local), f"{type(method.objective).__name__}.remember")
    require(
        versions == [v._version for v in received],
        f"{name} overwrote what a client received or kept from a past round; return new tensors instead.",
    )
    if "delta" in state_of(upload, f"{name}.finish"):
        vector_like(upload["delta"], theta, f"{name}.finish as delta")
    read, kept, sent = _transmitted(place, upload, local)
    state = {**state_of(own, f"{name}.finish"), **remembered, **kept}
    return Report(
        order.client,
        _own(read, model),
        _own(state, model),
        loss=float(torch.stack(list(losses.values())).mean()) if losses else float("nan"),
        sent=sent,
        steps=order.steps,
        weight=order.weight,
        finite=all_finite(read) and all_finite(state),
    )


def _transmitted(place: Workplace, upload: State, local: Local) -> tuple[State, State, Bytes]:
    """An upload as the server reads it, what the uplink keeps at the client, and the bytes that travelled."""
    part = place.travelling
    if "delta" not in upload or (place.uplink.exact and part == slice(None)):
        return upload, {}, sizes(upload)
    delta = upload["delta"]
    message, kept = place.uplink.encode(delta[part], local.client, local.rng("uplink"))
    read = place.uplink.decode(message, delta[part].numel())
    if part != slice(None):
        read = torch.zeros_like(delta).index_copy(0, torch.arange(len(delta))[part].to(delta.device), read)
    return {**upload, "delta": read}, kept, {**sizes(upload), "delta": sum(sizes(message).values())}


def _gradient(objective: Objective, point: Vector, local: Local) -> tuple[Vector, Tensor]:
    """Of the objective on the present batch, and its value."""
    derivative, model, batch = objective.derivative, local.model, local.batch
    if derivative is None:
        return model.gradient_of(lambda: objective(model, batch, local), point)
    return model.gradient_from(lambda logits: derivative(logits, batch, local), batch.x, point)


def _arrive(place: Workplace, broadcast: Broadcast, order: Order) -> tuple[Local, Iterable[Array]]:
    """What a client sees, and the positions of its batches."""
    work, data = place.work, place.data(order.client)

    def rng(purpose: str) -> np.random.Generator:
        return generator(place.seed, purpose, broadcast.round, order.client)

    positions: Iterable[Array] = islice(
        shuffled(len(data), work.batch_size, work.steps, work.epochs, rng("batches")), order.steps
    )
    touched = None
    if order.steps * work.batch_size < len(data):  # then no sample is drawn twice
        positions = list(positions)
        touched = np.sort(np.concatenate(positions))
    state = order.state
    if state is None:
        state = place.client_state(broadcast.theta)
    local = Local(
        place.model,
        data,
        start=broadcast.theta,
        server=dict(broadcast.server),  # dicts of its own: what a method puts in them stays here
        client={key: value.to(place.model.device) for key, value in state.items()},
        lr=broadcast.lr,
        steps=order.steps,
        mean_samples=place.mean_samples,
        rng=rng,
        touched=touched,
    )
    return local, positions


def _own(state: State, model: FlatModel) -> State:
    """Tensors that the next client will not overwrite, and without a graph behind them."""
    return {key: (value.clone() if model.owns(value) else value).detach() for key, value in state.items()}
