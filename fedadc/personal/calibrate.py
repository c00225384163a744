"""Classifier calibration (section IV-D): a client goes on from the global model with a part of it, on its own data.

For the classifier alone a client is one whose inputs are the frozen body's features and whose model is the head: the
inner loop is that of training, and the body is passed once, whatever the number of epochs and of regularizers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedadc.data.batches import Augment, ClientData, Inputs, count_steps
from fedadc.data.dataset import Array, Normalization, Samples
from fedadc.errors import Diverged, require
from fedadc.federation import Federation
from fedadc.methods import FedAvg, FedProx, Method
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import Vector
from fedadc.objectives import SelfConfidence
from fedadc.training.local import ClientContext, local_update
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.views.local_work import LocalWork

REGULARIZERS = ("none", "prox", "confidence")
LAYERS = ("head", "all")
ROUND = 0  # no round of training has this number, so what calibration draws is its own
Layers = Literal["head", "all"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How every client calibrates."""

    work: LocalWork
    layers: Layers = "head"
    mu: float = FedProx.mu  # of the proximal term
    lam: float = SelfConfidence.lam  # of the self-confidence loss

    def __post_init__(self) -> None:
        require(self.layers in LAYERS, f"layers is head or all, not {self.layers!r}.")

    def method(self, regularizer: str) -> Method:
        """What calibrates as the regularizer says, if it is one."""
        methods: dict[str, Callable[[], Method]] = {
            "none": FedAvg,
            "prox": lambda: FedProx(mu=self.mu),
            "confidence": lambda: FedAvg(objective=SelfConfidence(lam=self.lam)),
        }
        require(regularizer in methods, f"regularizer is none, prox or confidence, not {regularizer!r}.")
        return methods[regularizer]()


def calibration_work(local: LocalWork, epochs: int = 2, lr: float | None = None) -> LocalWork:
    """A run's own local work, for so many epochs, at the learning rate before any schedule."""
    return replace(local, steps=None, epochs=epochs, lr=local.lr if lr is None else lr)


@dataclass(frozen=True)
class TunedPart:
    """The part of a model that is tuned, and how samples look to it."""

    model: FlatModel  # the part alone
    start: Vector
    prefix: str  # of its names in the whole model's state dict
    inputs: Inputs
    augment: Augment
    cut: int  # samples of a forward pass
    seen: Callable[[Samples, Array], Samples]

    def right(self, theta: Vector, own: Samples) -> int:
        """How many of its samples a model gets right."""
        total = 0
        for start in range(0, len(own), self.cut):
            x, y = self.inputs.gather(own, np.arange(start, min(start + self.cut, len(own))))
            total += int((self.model.predict(theta, x).argmax(dim=1) == y).sum())
        return total

    def state_dict(self, theta: Vector) -> dict[str, Tensor]:
        """What is tuned, under the names that it has in the whole model."""
        named = self.model.module.named_parameters(remove_duplicate=False)
        names = {name for name, p in named if p.requires_grad}
        return {self.prefix + n: v for n, v in self.model.state_dict(theta).items() if n in names}


def tuned_part(federation: Federation, theta: Vector, layers: Layers) -> TunedPart:
    """Of a federation's model at theta, which becomes its present one."""
    model, place, cut = federation.model, federation.context, federation.counter.evaluation.batch_size
    model.theta.copy_(theta)
    if layers == "all":
        return TunedPart(model, model.theta.clone(), "", place.inputs, place.augment, cut, Samples.take)
    require_split(model, federation.example)

    def features(samples: Samples, indices: Array) -> Samples:
        """At the present theta: to work at another one is to copy the whole model twice."""
        own = ClientData(samples, indices, place.classes, place.inputs, Augment())
        batches = [(model.features(model.theta, b.x), b.y) for b in own.in_order(None, cut)]
        x, y = (torch.cat(column) for column in zip(*batches, strict=True))
        return Samples(x, y)

    head = FlatModel(copy.deepcopy(model.module.head), model.device)  # type: ignore[arg-type]
    plain = Inputs(Normalization(), model.dtype, model.device)
    return TunedPart(head, head.theta.clone(), "head.", plain, Augment(), cut, features)


def require_split(model: FlatModel, example: Tensor) -> None:
    """Refuse a model whose classifier cannot be tuned by itself."""
    model.part("head")
    name, way_out = type(model.module).__name__, "tune the whole model instead (--layers all)"
    require(model.is_head_of_embed(example), f"{name}'s forward(x) is not head(embed(x)); {way_out}.")
    inside = {id(p) for p in model.module.head.parameters()}  # type: ignore[union-attr]
    outside = [p for n, p in model.module.named_parameters(remove_duplicate=False) if not n.startswith("head.")]
    require(not any(id(p) in inside for p in outside), f"{name}'s head shares weights with its body; {way_out}.")


@dataclass(frozen=True)
class SingleClientContext(ClientContext):
    """The workplace of one client: all samples there are its own."""

    def data(self, client: int) -> ClientData:
        return ClientData(self.train, np.arange(len(self.train)), self.classes, self.inputs, self.augment)


def calibrated(
    part: TunedPart, place: ClientContext, client: int, own: Samples, work: LocalWork, method: Method
) -> Vector:
    """The part of a client's model after local work on its own samples, as the part sees them."""
    seen = part.inputs, part.augment
    desk = SingleClientContext(part.model, method, work, own, place.clients, place.classes, *seen, place.seed)
    steps = int(count_steps(np.array([len(own)]), work.batch_size, work.steps, work.epochs)[0])
    report = local_update(desk, ServerBroadcast(ROUND, work.lr, part.start, {}), ClientTask(client, steps))
    if not report.finite:
        raise Diverged(f"client {client}: calibration has left the finite numbers; lower the learning rate (--lr).")
    return part.model.theta.clone()  # where the inner loop has come to; start - delta would round
