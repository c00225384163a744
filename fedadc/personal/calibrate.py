"""Classifier calibration (section IV-D): a client tunes a part of the global model on its own data.

To tune the classifier alone, the body is frozen: its features are the client's inputs, and the head is the client's
model. The inner loop is the one of training. One forward pass through the body serves all epochs and regularizers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedadc.communication.uplinks import Full
from fedadc.data.batches import Augment, ClientData, Inputs, count_steps
from fedadc.data.dataset import Array, Normalization, Samples
from fedadc.errors import Diverged, require, unknown
from fedadc.fields.settings import Settings
from fedadc.methods import FedAvg, FedProx, Method
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import Vector
from fedadc.objectives import Objective, SelfConfidence, default_objective
from fedadc.tasks import Classification, Task
from fedadc.training.aggregate import received
from fedadc.training.agreement import Agreement
from fedadc.training.ensembles import Ensembles
from fedadc.training.local import local_update
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.server import Server
from fedadc.views.local_work import LocalWork

ROUND = 0  # training rounds start at 1, so calibration has its own random numbers
Layers = Literal["head", "all"]
Models = dict[str, Vector]  # the models of a client by variant: a regularizer, or "own" for a stored model


@dataclass(frozen=True, kw_only=True)
class Calibration(Settings):
    """How every client tunes its model."""

    work: LocalWork
    layers: Layers = "head"
    mu: float = FedProx.mu  # weight of the proximal term
    lam: float = SelfConfidence.lam  # weight of the self-confidence loss

    def method(self, regularizer: str, task: str = Classification.name) -> Method:
        """The method whose local work has this regularizer, with the loss of this task."""
        if regularizer not in REGULARIZERS:
            raise unknown("regularizer", regularizer, REGULARIZERS)
        method = REGULARIZERS[regularizer](self, default_objective(task))
        needed, fits = method.objective.task, f"the task of the run is {task}; use another regularizer"
        require(needed in ("", task), f"the regularizer {regularizer} needs task: {needed}, but {fits}.")
        return method


REGULARIZERS: dict[str, Callable[[Calibration, Objective], Method]] = {
    "none": lambda _, loss: FedAvg(objective=loss),
    "prox": lambda calibration, loss: FedProx(mu=calibration.mu, objective=loss),
    "confidence": lambda calibration, _: FedAvg(objective=SelfConfidence(lam=calibration.lam)),
}


def calibration_work(local: LocalWork, epochs: int = 2, lr: float | None = None) -> LocalWork:
    """The local work of a run, with this number of epochs and by default its learning rate before any schedule."""
    return replace(local, steps=None, epochs=epochs, lr=local.lr if lr is None else lr)


@dataclass(frozen=True)
class TunedPart:
    """The part of a model that is tuned (its head, or all of it), and how to compute the part's inputs."""

    model: FlatModel  # the part alone
    start: Vector  # its parameters in the global model
    prefix: str  # of its parameter names in the state dict of the whole model
    inputs: Inputs
    augment: Augment
    batch_size: int  # of a forward pass
    features: Callable[[Samples, Array], Samples]  # inputs of the part: of a head, the features of the frozen body
    task: Task

    def total(self, theta: Vector, features: Samples) -> float:
        """The sum over samples of how good or bad the part is with the parameters `theta`: of `Task.sample_values`."""
        total = 0.0
        for start in range(0, len(features), self.batch_size):
            chosen = np.arange(start, min(start + self.batch_size, len(features)))
            x, _ = self.inputs.gather(features, chosen)
            total += float(self.task.sample_values(self.model.predict(theta, x), features.labels(chosen)).sum())
        return total

    def state_dict(self, theta: Vector) -> dict[str, Tensor]:
        """The tuned parameters under their names in the whole model."""
        state = self.model.state_dict(theta)
        return {self.prefix + name: state[name] for name in self.model.slot_names()}


def tuned_part(agreement: Agreement, theta: Vector, layers: Layers, batch_size: int) -> TunedPart:
    """The part of a model to tune; `batch_size` is that of a forward pass. Loads `theta` into the model."""
    model = agreement.model
    model.theta.copy_(theta)
    task = agreement.task
    if layers == "all":
        return TunedPart(
            model, model.theta.clone(), "", agreement.inputs, agreement.augment, batch_size, Samples.take, task
        )
    require_split(model, agreement.example)

    def features(samples: Samples, indices: Array) -> Samples:
        """Features of the body at the model's current theta; any other theta would have to be copied in and back."""
        data = ClientData(samples, indices, agreement.task, agreement.inputs, Augment())
        x = torch.cat([model.features(model.theta, batch.x) for batch in data.in_order(None, batch_size)])
        return Samples(x, samples.labels(indices))

    head, prefix = FlatModel(copy.deepcopy(model.head_layer), model.device), f"{model.head_name}."
    unchanged = Inputs(Normalization(), model.dtype, model.device, task=task)  # features are not normalized
    return TunedPart(head, head.theta.clone(), prefix, unchanged, Augment(), batch_size, features, task)


def require_split(model: FlatModel, example: Tensor) -> None:
    """Refuse a model whose classifier cannot be tuned separately from the body."""
    name, advice = type(model.module).__name__, 'tune the whole model instead (`--layers all`, in Python layers="all")'
    require(model.is_split, f"{name} has no split into `embed` and `head`; {advice}.")
    require(model.is_head_of_embed(example), f"{name}'s forward(x) is not head(embed(x)); {advice}.")
    inside, prefix = {id(p) for p in model.head_layer.parameters()}, f"{model.head_name}."
    outside = [p for n, p in model.module.named_parameters(remove_duplicate=False) if not n.startswith(prefix)]
    require(not any(id(p) in inside for p in outside), f"{name}'s head shares weights with its body; {advice}.")


def calibrated(
    part: TunedPart, agreement: Agreement, client: int, features: Samples, work: LocalWork, method: Method
) -> Vector:
    """The parameters of the part after local work of a client on its features."""
    own = replace(
        agreement, model=part.model, start=part.start, server=Server(method, Ensembles()), work=work,
        inputs=part.inputs, augment=part.augment, uplink=Full(),
    )  # fmt: skip
    steps = int(count_steps(np.array([len(features)]), work.batch_size, work.steps, work.epochs)[0])
    sent = ServerBroadcast(ROUND, work.lr, part.start, {}, float(len(features)))
    result = local_update(own, own.client_data(features), None, sent, ClientTask(client, steps))
    if not received(own, result, 1.0).reports[0].finite:
        raise Diverged(f"client {client}: calibration diverged to non-finite values; lower the learning rate (`lr`).")
    return part.model.theta.clone()  # exactly what the inner loop computed; start - delta would be rounded


@dataclass(frozen=True)
class ClientTuner:
    """Calibrates the models of one client after another, and tells how good they are."""

    part: TunedPart  # the part of the model that differs between clients
    agreement: Agreement
    calibration: Calibration
    regularizers: tuple[str, ...]

    def models(self, client: int, samples: Samples, own: Array) -> Models:
        """The models of a client, calibrated on its `own` samples, with each of the regularizers."""
        features, work = self.part.features(samples, own), self.calibration.work
        task = self.agreement.task.name
        methods = {name: self.calibration.method(name, task) for name in dict.fromkeys(self.regularizers)}
        return {name: calibrated(self.part, self.agreement, client, features, work, m) for name, m in methods.items()}

    def totals(self, models: Models, samples: Samples, own: Array) -> dict[str, float]:
        """The sum of `Task.sample_values` over a client's `own` samples, of each of these models."""
        if not len(own):
            return dict.fromkeys(models, 0.0)
        features = self.part.features(samples, own)
        return {name: self.part.total(theta, features) for name, theta in models.items()}

    def tuned(self, theta: Vector, differing: bool) -> dict[str, Tensor]:
        """The parameters of a client's part by name; if `differing`, only those that differ from the global model."""
        state, shared = self.part.state_dict(theta), self.part.state_dict(self.part.start)
        return {name: v for name, v in state.items() if not differing or not torch.equal(v, shared[name])}
