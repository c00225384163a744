"""What the server and every client of a run agree on before training: the model, the method and all settings of both.

Each half builds its own from the same settings. It holds no sample and no state of a run.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedadc.communication.ledger import Bytes, sizes
from fedadc.communication.uplinks import Uplink
from fedadc.data.batches import Augment, ClientData, Inputs
from fedadc.data.dataset import Array, DataSpec, Normalization, Samples
from fedadc.errors import FedadcError, require
from fedadc.fields.summary import summary
from fedadc.methods.base import Method
from fedadc.models.build import needs_whole_numbers, prefers_channels_last, probe
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import State, Vector, vector_like
from fedadc.objectives import DEFAULT_OBJECTIVES, Objective
from fedadc.tasks import Task
from fedadc.training.faults import NormBound
from fedadc.training.server import Server
from fedadc.views.local_work import LocalWork

LARGEST_WHOLE = 2**24  # every whole number up to it is a float32
DELTA = "delta."  # begins the names under which an uplink's message is sent


@dataclass(frozen=True)
class Agreement:
    """The model, the method and the settings that the server and all clients share."""

    model: FlatModel  # a place to compute in: theta changes with every client
    start: Vector  # the initial weights
    example: Tensor  # two inputs of the model
    server: Server  # the method's server half; clients need to know which vectors it sends
    work: LocalWork
    task: Task
    inputs: Inputs
    augment: Augment
    uplink: Uplink
    seed: int
    drift: bool = False  # clients measure how far they drift, and the server collects it
    bound: NormBound | None = None  # of the uploads that the server reads; clients need not know it

    @property
    def method(self) -> Method:
        return self.server.method

    def load_weights(self, state: Mapping[str, Tensor], source: str) -> None:
        """Start from the weights of a state dict instead of the module's own; `source` names them in messages."""
        self.model.load_state_dict(dict(state), source)
        self.start.copy_(self.model.theta)

    def __repr__(self) -> str:
        facts = {
            "model": self.model,
            "method": self.method,
            "work": self.work,
            "uplink": self.uplink,
            "seed": self.seed,
        }
        return summary("Agreement", facts)

    @property
    def sent_part(self) -> slice:
        """The part of theta that is sent."""
        part = self.method.travels
        return slice(None) if part == "all" else self.model.part(part)

    def client_state(self, theta: Vector) -> State:
        """The state of a client that is selected for the first time: of method, objective, uplink and optimizer."""
        of_uplink = self.uplink.client_state(theta[self.sent_part]) if self.method.federated else {}
        own = {**self.method.client_state(theta), **self.method.objective.client_state(theta)}
        return {**own, **of_uplink, **self.work.optimizer.client_state(theta)}

    def client_data(self, samples: Samples, indices: Array | None = None) -> ClientData:
        """One client's data: all these samples, or those at its indices."""
        own = np.arange(len(samples)) if indices is None else indices
        return ClientData(samples, own, self.task, self.inputs, self.augment)

    def encoded(self, upload: State, client: State, rng: np.random.Generator) -> tuple[State, State]:
        """An upload as it is sent, and what the uplink keeps at the client."""
        part = self.sent_part
        if "delta" not in upload or (self.uplink.exact and part == slice(None)):
            return upload, {}
        message, kept = self.uplink.encode(upload["delta"][part], client, rng)
        others = {name: vector for name, vector in upload.items() if name != "delta"}
        return {**{DELTA + name: tensor for name, tensor in message.items()}, **others}, kept

    def decoded(self, upload: State) -> State:
        """An upload as the method's `update` reads it, from what was sent."""
        message = {name.removeprefix(DELTA): v for name, v in upload.items() if name.startswith(DELTA)}
        if not message:
            return upload
        part, like = self.sent_part, self.model.theta
        delta = self.uplink.decode(message, like[part].numel())
        if part != slice(None):
            delta = torch.zeros_like(like).index_copy(0, torch.arange(len(like))[part].to(like.device), delta)
        delta = vector_like(delta, like, f"{type(self.uplink).__name__}.decode")
        return {"delta": delta, **{name: v for name, v in upload.items() if not name.startswith(DELTA)}}

    def bytes_of(self, upload: State) -> Bytes:
        """The bytes of an upload as it is sent, by the name of the vector."""
        sent: Bytes = {}
        for name, size in sizes(upload).items():
            vector = "delta" if name.startswith(DELTA) else name
            sent[vector] = sent.get(vector, 0) + size
        return sent

    def fingerprint(self) -> str:
        """A checksum of all settings and of the initial weights; a message carries it, so other runs are noticed."""
        inputs = replace(self.inputs, device="any")  # server and clients may compute on different devices
        settings = (self.server, self.work, self.task, inputs, self.augment, self.uplink, self.seed)
        drift = ("drift",) if self.drift else ()
        digest = hashlib.sha256(repr((settings, self.start.dtype, self.start.shape, *drift)).encode())
        digest.update(self.start.cpu().view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
        return digest.hexdigest()


def agree(
    module: nn.Module,
    spec: DataSpec,
    server: Server,
    *,
    work: LocalWork,
    augment: Augment,
    uplink: Uplink,
    seed: int,
    channels_last: bool | None = None,
    device: torch.device | str = "cpu",
    samples: Samples | None = None,
    drift: bool = False,
    bound: NormBound | None = None,
    head: str | None = None,
) -> Agreement:
    """Check that a module works on data of this kind, and build an agreement; the module itself is not changed.

    `samples` gives the batch for the check. A server, which has none, checks with a batch of zeros.
    """
    if samples is None:
        samples = Samples(torch.zeros((2, *spec.input_shape), dtype=spec.dtype), spec.task.blank_labels(2))
    device, model = torch.device(device), copy.deepcopy(module).cpu()
    _check_augment(augment, spec)
    inputs = _inputs_for(model, spec, samples, channels_last, device, seed)
    example = inputs.gather(samples, np.arange(min(2, len(samples))))[0]
    keeps_norms = server.method.travels == "without_batch_norm"
    probe(model, example, spec.task, seed, keeps_norms)
    flat = FlatModel(model, device, head, keeps_norms)
    agreement = Agreement(
        model=flat, start=flat.theta.clone(), example=example.to(flat.device), server=server, work=work,
        task=spec.task, inputs=replace(inputs, device=flat.device), augment=augment, uplink=uplink,
        seed=seed, drift=drift, bound=bound,
    )  # fmt: skip
    _check_objective(server.method.objective, spec.task)
    require(
        server.method.federated or uplink.exact,
        f"{type(server.method).__name__} sends nothing that communication.uplink could compress.",
    )
    require(
        head is None or flat.is_head_of_embed(agreement.example),
        f"head: the output of {head} is not that of {type(module).__name__}; name the last layer.",
    )
    return agreement


def _check_objective(objective: Objective, task: Task) -> None:
    kind = {"classification": "classes", "regression": "numbers"}
    require(
        objective.task in ("", task.name),
        f"objective {type(objective).__name__} is for labels that are {kind.get(objective.task, objective.task)}, but "
        f"here they are {kind.get(task.name, task.name)} (task: {task.name}); use "
        f"{DEFAULT_OBJECTIVES.get(task.name, 'another one')}.",
    )


def _check_augment(augment: Augment, spec: DataSpec) -> None:
    shape = list(spec.input_shape)
    require(
        not augment or len(shape) == 3,
        f"augment needs images [channels, height, width], not inputs of shape {shape}.",
    )
    require(
        not augment or augment.crop <= min(shape[1:]),
        f"augment.crop is {augment.crop}, more than the images' {shape[1:]} pixels.",
    )


def _check_whole_numbers(samples: Samples, model: str) -> None:
    """Refuse inputs that would be changed when they become whole numbers."""
    if samples.x.is_floating_point():
        wrong = torch.nonzero((samples.x != samples.x.round()) | (samples.x.abs() > LARGEST_WHOLE))
        if len(wrong):
            value = samples.x[tuple(wrong[0])].item()
            raise FedadcError(
                f"model {model} takes whole numbers up to {LARGEST_WHOLE}, but sample {int(wrong[0, 0])} has {value:g}."
            )


def _inputs_for(
    model: nn.Module, spec: DataSpec, samples: Samples, channels_last: bool | None, device: torch.device, seed: int
) -> Inputs:
    """How samples become the inputs of a model that is still on the CPU."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    planes = Inputs(spec.normalization, dtype, task=spec.task)
    images = len(spec.input_shape) == 3
    require(images or not channels_last, "channels_last is for images [channels, height, width].")
    some = np.arange(min(2, len(samples)))
    if planes.normalization == Normalization() and needs_whole_numbers(model, planes.gather(samples, some)[0], seed):
        _check_whole_numbers(samples, type(model).__name__)
        return replace(planes, whole=True)
    if not images or channels_last is False:
        return planes
    pixels = replace(planes, channels_last=True)
    if channels_last:
        return pixels
    x, pixel_by_pixel = (inputs.gather(samples, some)[0] for inputs in (planes, pixels))
    return pixels if device.type == "cpu" and prefers_channels_last(model, x, pixel_by_pixel, seed) else planes
