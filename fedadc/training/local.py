"""THE inner loop: what one client does in one round. It sees its own data, what it received, and nothing else.

The order of operations, once for all methods: loss gradient at the point where it is taken -> clip -> + weight decay
× that point -> the method's correction -> local momentum or optimizer -> the method's step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedadc.data.batches import ClientData, shuffled
from fedadc.data.dataset import Array
from fedadc.errors import require
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import State, Vector, pair_of, state_of, vector_like
from fedadc.objectives import Objective
from fedadc.optimizers import Stepper
from fedadc.rng import generator, torch_seeded
from fedadc.training.agreement import Agreement
from fedadc.training.drift import norm_of
from fedadc.training.faults import all_finite
from fedadc.training.messages import ClientResult, ClientTask, ServerBroadcast
from fedadc.views.local import Local


class Momentum(Stepper):
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


def local_update(
    agreement: Agreement, data: ClientData, state: State | None, broadcast: ServerBroadcast, task: ClientTask
) -> ClientResult:
    """Train one client on its own data, from its own state (None: it has none yet) and from what it received."""
    model, method, work = agreement.model, agreement.method, agreement.work
    state = agreement.client_state(broadcast.theta) if state is None else state
    local, positions = _local_view(agreement, data, state, broadcast, task)
    received = [local.start, *local.server.values(), *local.client.values()]
    versions = [v._version for v in received]
    name, optimizer = type(method).__name__, work.optimizer
    stepper = Momentum(work.momentum, model.theta) if optimizer.plain else optimizer.stepper(model.theta, local.client)
    losses: dict[int, Tensor] = {}  # of each step

    grad = _directions(agreement, local, stepper, losses)
    with torch_seeded(agreement.seed, "dropout", broadcast.round, task.client):
        theta = model.theta
        theta.copy_(vector_like(method.begin(local), theta, f"{name}.begin"))
        for step, batch in enumerate(local.data.batches(positions, local.rng)):
            local.step, local.batch = step, batch
            moved = method.step(theta, grad, local)
            if moved is not theta:
                theta.copy_(vector_like(moved, theta, f"{name}.step"))
            stepper.next_step()
        distance = _distance(theta, local.start, agreement.sent_part) if agreement.drift else math.nan
        upload, own = pair_of(method.finish(theta, local), f"{name}.finish")
        remembered = state_of(method.objective.remember(theta, local), f"{type(method.objective).__name__}.remember")
    require(
        versions == [v._version for v in received],
        f"{name} overwrote what a client received or kept from a past round; return new tensors instead.",
    )
    if "delta" in state_of(upload, f"{name}.finish"):
        vector_like(upload["delta"], theta, f"{name}.finish as delta")
    sent, kept = agreement.encoded(upload, local.client, local.rng("uplink"))
    new = {**state_of(own, f"{name}.finish"), **remembered, **kept, **stepper.state()}
    return ClientResult(
        task.client,
        _own(sent, model),
        _own(new, model),
        loss=float(torch.stack(list(losses.values())).mean()) if losses else float("nan"),
        finite=all_finite(new),
        distance=distance,
    )


def _directions(
    agreement: Agreement, local: Local, stepper: Stepper, losses: dict[int, Tensor]
) -> Callable[[Vector], Vector]:
    """What a method calls for the direction of a step at a point; `losses` gets the value of the loss of every step."""
    method, work = agreement.method, agreement.work
    name, decoupled = type(method).__name__, work.optimizer.decoupled

    def grad(point: Vector) -> Vector:
        g, loss = _gradient(method.objective, point, local)
        losses.setdefault(local.step, loss)  # the first of the step, where a method takes several gradients
        if work.clip is not None:
            g.mul_((work.clip / torch.linalg.vector_norm(g[method.trained(local)])).clamp(max=1))
        if work.weight_decay and not decoupled:
            g.add_(point, alpha=work.weight_decay)
        direction = stepper(vector_like(method.correct(g, point, local), g, f"{name}.correct"))
        if work.weight_decay and decoupled:
            part = method.trained(local)
            direction[part].add_(point[part], alpha=work.weight_decay)
        return direction

    return grad


def _distance(theta: Vector, start: Vector, part: slice) -> float:
    """How far a client has moved from the global model, over the part that is sent."""
    return norm_of(theta[part] - start[part])


def _gradient(objective: Objective, point: Vector, local: Local) -> tuple[Vector, Tensor]:
    """The gradient of the objective on the present batch, and its value."""
    derivative, model, batch = objective.derivative, local.model, local.batch
    if derivative is None:
        return model.gradient_of(lambda: objective(model, batch, local), point)
    return model.gradient_from(lambda logits: derivative(logits, batch, local), batch.x, point)


def _local_view(
    agreement: Agreement, data: ClientData, state: State, broadcast: ServerBroadcast, task: ClientTask
) -> tuple[Local, Iterable[Array]]:
    """The client's view of its round, and the positions of its batches."""
    work = agreement.work

    def rng(purpose: str) -> np.random.Generator:
        return generator(agreement.seed, purpose, broadcast.round, task.client)

    positions: Iterable[Array] = islice(
        shuffled(len(data), work.batch_size, work.steps, work.epochs, rng("batches")), task.steps
    )
    touched = None
    if task.steps * work.batch_size < len(data):  # then no sample is used twice
        positions = list(positions)
        touched = np.sort(np.concatenate(positions))
    local = Local(
        agreement.model,
        data,
        start=broadcast.theta,
        server=dict(broadcast.server),  # copies of the dicts: what a method adds to them stays with this client
        client={key: value.to(agreement.model.device) for key, value in state.items()},
        lr=broadcast.lr,
        steps=task.steps,
        mean_samples=broadcast.mean_samples,
        rng=rng,
        momentum=work.momentum,
        touched=touched,
    )
    return local, positions


def _own(state: State, model: FlatModel) -> State:
    """Detached tensors that the next client does not overwrite."""
    return {key: (value.clone() if model.owns(value) else value).detach() for key, value in state.items()}
