"""THE inner loop: what one client does in one round. It sees its own data, what it received, and nothing else.

The order of operations, once for all methods: loss gradient at the point where it is taken -> clip -> + weight decay
× that point -> the method's correction -> local momentum -> the method's step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedadc.communication.ledger import Bytes, sizes
from fedadc.communication.uplinks import Full, Uplink
from fedadc.data.batches import Augment, ClientData, Inputs, shuffled
from fedadc.data.dataset import Array, Clients, Samples
from fedadc.errors import require
from fedadc.methods.base import Method
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import State, Vector, pair_of, state_of, vector_like
from fedadc.objectives import Objective
from fedadc.rng import generator, torch_seeded
from fedadc.training.faults import all_finite
from fedadc.training.messages import ClientResult, ClientTask, ServerBroadcast
from fedadc.views.local import Local
from fedadc.views.local_work import LocalWork


class Momentum:
    """Local momentum, v = mu * v + g, from zero in every client's round.

    Several gradients of one step all start from the v of the step before.
    """

    def __init__(self, mu: float, like: Vector) -> None:
        self.mu, self.used = mu, False  # used: in the present step
        if mu:
            self.before, self.after = torch.zeros_like(like), torch.zeros_like(like)

    def __call__(self, g: Vector) -> Vector:
        if not self.mu:
            return g
        torch.add(g, self.before, alpha=self.mu, out=self.after)
        self.used = True
        return g.copy_(self.after)  # a copy: the step may overwrite g

    def next_step(self) -> None:
        if self.used:
            self.before, self.after, self.used = self.after, self.before, False


@dataclass(frozen=True)
class ClientContext:
    """What all clients of a run share: the model, the method and the settings of local training."""

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

    @property
    def mean_samples(self) -> float:
        return len(self.clients.indices) / len(self.clients)

    @property
    def sent_part(self) -> slice:
        """The part of theta that is sent."""
        part = self.method.travels
        return slice(None) if part == "all" else self.model.part(part)

    def client_state(self, theta: Vector) -> State:
        """The state of a client that is selected for the first time: the method's, the objective's, the uplink's."""
        of_uplink = self.uplink.client_state(theta[self.sent_part]) if self.method.federated else {}
        return {**self.method.client_state(theta), **self.method.objective.client_state(theta), **of_uplink}

    def data(self, client: int) -> ClientData:
        return ClientData(self.train, self.clients[client], self.classes, self.inputs, self.augment)


def local_update(context: ClientContext, broadcast: ServerBroadcast, task: ClientTask) -> ClientResult:
    """Train one client from what it received."""
    model, method, work = context.model, context.method, context.work
    local, positions = _local_view(context, broadcast, task)
    received = [local.start, *local.server.values(), *local.client.values()]
    versions = [v._version for v in received]
    name, momentum = type(method).__name__, Momentum(work.momentum, model.theta)
    losses: dict[int, Tensor] = {}  # of each step

    def grad(point: Vector) -> Vector:
        g, loss = _gradient(method.objective, point, local)
        losses.setdefault(local.step, loss)  # the first of the step, where a method takes several gradients
        if work.clip is not None:
            g.mul_((work.clip / torch.linalg.vector_norm(g[method.trained(local)])).clamp(max=1))
        if work.weight_decay:
            g.add_(point, alpha=work.weight_decay)
        return momentum(vector_like(method.correct(g, point, local), g, f"{name}.correct"))

    with torch_seeded(context.seed, "dropout", broadcast.round, task.client):
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
    received_upload, kept, sent = _transmitted(context, upload, local)
    state = {**state_of(own, f"{name}.finish"), **remembered, **kept}
    return ClientResult(
        task.client,
        _own(received_upload, model),
        _own(state, model),
        loss=float(torch.stack(list(losses.values())).mean()) if losses else float("nan"),
        sent=sent,
        steps=task.steps,
        weight=task.weight,
        finite=all_finite(received_upload) and all_finite(state),
    )


def _transmitted(context: ClientContext, upload: State, local: Local) -> tuple[State, State, Bytes]:
    """An upload as the server receives it, what the uplink keeps at the client, and the bytes sent."""
    part = context.sent_part
    if "delta" not in upload or (context.uplink.exact and part == slice(None)):
        return upload, {}, sizes(upload)
    delta = upload["delta"]
    message, kept = context.uplink.encode(delta[part], local.client, local.rng("uplink"))
    read = context.uplink.decode(message, delta[part].numel())
    if part != slice(None):
        read = torch.zeros_like(delta).index_copy(0, torch.arange(len(delta))[part].to(delta.device), read)
    return {**upload, "delta": read}, kept, {**sizes(upload), "delta": sum(sizes(message).values())}


def _gradient(objective: Objective, point: Vector, local: Local) -> tuple[Vector, Tensor]:
    """The gradient of the objective on the present batch, and its value."""
    derivative, model, batch = objective.derivative, local.model, local.batch
    if derivative is None:
        return model.gradient_of(lambda: objective(model, batch, local), point)
    return model.gradient_from(lambda logits: derivative(logits, batch, local), batch.x, point)


def _local_view(context: ClientContext, broadcast: ServerBroadcast, task: ClientTask) -> tuple[Local, Iterable[Array]]:
    """The client's view of its round, and the positions of its batches."""
    work, data = context.work, context.data(task.client)

    def rng(purpose: str) -> np.random.Generator:
        return generator(context.seed, purpose, broadcast.round, task.client)

    positions: Iterable[Array] = islice(
        shuffled(len(data), work.batch_size, work.steps, work.epochs, rng("batches")), task.steps
    )
    touched = None
    if task.steps * work.batch_size < len(data):  # then no sample is used twice
        positions = list(positions)
        touched = np.sort(np.concatenate(positions))
    state = task.state
    if state is None:
        state = context.client_state(broadcast.theta)
    local = Local(
        context.model,
        data,
        start=broadcast.theta,
        server=dict(broadcast.server),  # copies of the dicts: what a method adds to them stays with this client
        client={key: value.to(context.model.device) for key, value in state.items()},
        lr=broadcast.lr,
        steps=task.steps,
        mean_samples=context.mean_samples,
        rng=rng,
        touched=touched,
    )
    return local, positions


def _own(state: State, model: FlatModel) -> State:
    """Detached tensors that the next client does not overwrite."""
    return {key: (value.clone() if model.owns(value) else value).detach() for key, value in state.items()}
