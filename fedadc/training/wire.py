"""Messages as bytes, and back. This is the whole of what passes between a server and its clients.

A message is a safetensors file: named tensors, and one JSON header with a version, the kind of the message, the
fingerprint of the agreement, and a few numbers. There is no pickle. The reader knows from its own agreement which
names, types and sizes it may receive; it refuses everything else, and anything too large before it makes room for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedadc.data.dataset import Samples
from fedadc.errors import FedadcError, one_line, require
from fedadc.models.vectors import State
from fedadc.system.determinism import deterministic
from fedadc.system.files import to_safetensors
from fedadc.training.agreement import Agreement
from fedadc.training.local import local_update
from fedadc.training.messages import ClientResult, ClientTask, ServerBroadcast
from fedadc.views.local_work import MOST

VERSION = 1
HEADER = "fedadc"  # the only entry of a file's metadata: safetensors writes several in arbitrary order
MAX_MESSAGE_HEADER = 1 << 16  # bytes for names, shapes and numbers
Header = TypeVar("Header", bound="MessageHeader")


@dataclass(frozen=True)
class MessageHeader:
    """What is in the header of every message."""

    version: int
    kind: str
    agreement: str  # the fingerprint
    round: int
    client: int


@dataclass(frozen=True)
class TaskHeader(MessageHeader):
    lr: float
    mean_samples: float | None  # None: not known
    steps: int
    counted: int

    @property
    def mean_size(self) -> float:
        """The mean number of samples over all clients; NaN: not known."""
        return math.nan if self.mean_samples is None else self.mean_samples


@dataclass(frozen=True)
class ResultHeader(MessageHeader):
    loss: float | None  # None: not a number
    finite: bool
    keeps_state: bool


@dataclass(frozen=True)
class DriftHeader(ResultHeader):
    distance: float | None  # None: not a number


class Wire:
    """Writes and reads the messages of one run. Each half has its own, made from its own agreement."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement, self._fingerprint = agreement, agreement.fingerprint()
        theta = agreement.start
        server = agreement.server.start(theta)
        self._down = {"theta": theta[agreement.sent_part]}
        self._down |= {f"server.{name}": server[name] for name in agreement.server.downlink(theta)}
        if not agreement.method.federated:
            self._down = {}

    def __repr__(self) -> str:
        return f"Wire({self._fingerprint[:12]}, {size_of(self._down):,} bytes down)"

    def write_task(self, broadcast: ServerBroadcast, task: ClientTask) -> bytes:
        """What the server sends to one client."""
        header = self._task_header("task", broadcast, task)
        vectors = {"theta": broadcast.theta[self.agreement.sent_part]}
        vectors |= {f"server.{name}": vector for name, vector in broadcast.server.items()}
        return packed(header, {name: vectors[name] for name in self._down})

    def _origin(self, kind: str) -> tuple[int, str, str]:
        return VERSION, kind, self._fingerprint

    def _task_header(self, kind: str, broadcast: ServerBroadcast, task: ClientTask) -> TaskHeader:
        return TaskHeader(
            *self._origin(kind), broadcast.round, task.client,
            lr=float(broadcast.lr), mean_samples=None if math.isnan(broadcast.mean_samples) else broadcast.mean_samples,
            steps=task.steps, counted=task.counted,
        )  # fmt: skip

    def read_task(self, content: bytes) -> tuple[ServerBroadcast, ClientTask]:
        """What a client reads. The part of theta that is not sent is that of the initial weights."""
        header, tensors = self._unpacked(content, "task", TaskHeader, size_of(self._down))
        require_alike(tensors, self._down)
        device = self.agreement.model.device
        theta = self.agreement.start.clone()
        if "theta" in tensors:
            theta[self.agreement.sent_part] = tensors["theta"].to(device)
        vectors = {name.removeprefix("server."): v.to(device) for name, v in tensors.items() if name != "theta"}
        self._require_possible(header)
        broadcast = ServerBroadcast(header.round, header.lr, theta, vectors, header.mean_size)
        return broadcast, ClientTask(header.client, header.steps, counted=header.counted)

    @staticmethod
    def _require_possible(header: TaskHeader) -> None:
        whole, real = (header.steps, header.round), (header.lr, header.mean_samples)
        valid = all(1 <= n <= MOST for n in whole) and all(n is None or 0 < n < math.inf for n in real)
        require(valid, f"the message has impossible numbers: steps and round {whole}, lr and mean samples {real}.")

    def write_result(self, round: int, result: ClientResult, keeps_state: bool) -> bytes:
        """What a client sends back. Its new state stays with it."""
        loss = result.loss if math.isfinite(result.loss) else None
        facts = (*self._origin("result"), round, result.client, loss, result.finite, keeps_state)
        header = ResultHeader(*facts)
        if self.agreement.drift:
            header = DriftHeader(*facts, result.distance if math.isfinite(result.distance) else None)
        return packed(header, result.upload)

    def read_result(self, content: bytes, round: int, task: ClientTask) -> tuple[ClientResult, bool]:
        """What the server reads, and whether the client keeps a state. It must be the answer to this task."""
        kind = DriftHeader if self.agreement.drift else ResultHeader
        header, tensors = self._unpacked(content, "result", kind, size_of(self._up))
        asked, answered = (round, task.client), (header.round, header.client)
        require(
            asked == answered,
            f"the result is of round {answered[0]}, client {answered[1]}, but round {round}, client {task.client} was "
            "asked for.",
        )
        require_alike(tensors, self._up)
        upload = {name: vector.to(self.agreement.start.device) for name, vector in tensors.items()}
        loss = math.nan if header.loss is None or math.isinf(header.loss) else header.loss
        result = ClientResult(header.client, upload, {}, loss, header.finite, _distance_in(header))
        return result, header.keeps_state

    @cached_property
    def _up(self) -> State:
        """An upload like all those of the run: that of a client with two samples of zeros, after one step."""
        agreement, theta = self.agreement, self.agreement.start
        if not agreement.method.federated:
            return {}
        two = torch.zeros_like(agreement.example[:1].cpu()).repeat_interleave(2, dim=0)
        data = agreement.client_data(Samples(two, agreement.task.blank_labels(2)))
        server = agreement.server.start(theta)
        sent = {name: server[name] for name in agreement.server.downlink(theta)}
        broadcast = ServerBroadcast(1, 1.0, theta, sent, mean_samples=1.0)
        with deterministic():
            return local_update(agreement, data, None, broadcast, ClientTask(0, 1)).upload

    @property
    def largest_result(self) -> int:
        """Bytes of a result, at most."""
        return size_of(self._up) + MAX_MESSAGE_HEADER

    @staticmethod
    def kind_of(content: bytes) -> str:
        """What kind of message it is."""
        return str(_tree_of(content)["kind"])

    def _unpacked(self, content: bytes, kind: str, cls: type[Header], most: int) -> tuple[Header, State]:
        """The header and the tensors of a message that is not larger than expected."""
        require(
            len(content) <= most + MAX_MESSAGE_HEADER,
            f"a message of {len(content)} bytes is larger than a {kind} can be.",
        )
        tree = _tree_of(content)
        version, found, agreement = tree["version"], tree["kind"], tree["agreement"]
        require(version == VERSION, f"the message has version {version!r:.20}; this fedadc reads version {VERSION}.")
        require(found == kind, f"the message is a {found!r:.20}, but a {kind} is expected.")
        require(
            agreement == self._fingerprint, "the message is of another run: its settings or initial weights differ."
        )
        wrong = _wrong_entries(cls, tree)
        require(not wrong, f"the header of the message is wrong: {', '.join(wrong)[:100]}.")
        try:
            tensors: State = load(content)
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # KeyError: a type that torch lacks
            raise FedadcError(f"the message is damaged ({one_line(error)[:100]}).") from None
        return cls(**tree), tensors


def _wrong_entries(header: type[MessageHeader], tree: Mapping[str, Any]) -> list[str]:
    """The names of entries that a header lacks, should not have, or that have another type.

    Without pydantic, which takes long to import: a site may start a process for every message.
    """
    hints = get_type_hints(header)
    types = {name: get_args(hint) or (hint,) for name, hint in hints.items()}
    wrong = sorted(hints.keys() ^ tree.keys())
    return wrong + [name for name, value in tree.items() if name in types and type(value) not in types[name]]


def packed(header: MessageHeader, tensors: Mapping[str, Tensor]) -> bytes:
    return to_safetensors(tensors, {HEADER: json.dumps(vars(header), allow_nan=False)})


def _metadata(content: bytes) -> Any:
    """The metadata of a safetensors file: its length is in the first 8 bytes, then comes JSON."""
    length = int.from_bytes(content[:8], "little")
    require(8 <= length <= min(MAX_MESSAGE_HEADER, len(content) - 8), "the message is damaged, or not one of fedadc.")
    return json.loads(content[8 : 8 + length])["__metadata__"]


def _tree_of(content: bytes) -> dict[str, Any]:
    """The header of a message, as far as every version has it."""
    try:
        tree: dict[str, Any] = json.loads(_metadata(content)[HEADER])
        require({"version", "kind", "agreement"} <= tree.keys(), "the message is damaged, or not one of fedadc.")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FedadcError("the message is damaged, or not one of fedadc.") from None
    return tree


def _distance_in(header: ResultHeader) -> float:
    """The distance that a client has measured; NaN if it was not asked for, or is none."""
    distance = header.distance if isinstance(header, DriftHeader) else None
    require(distance is None or 0 <= distance < math.inf, f"the message has an impossible distance: {distance}.")
    return math.nan if distance is None else distance


def size_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(v.numel() * v.element_size() for v in tensors.values())


def require_alike(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    names = sorted(tensors.keys() ^ expected.keys())
    require(not names, f"the message lacks or should not have {', '.join(names)[:100]}.")
    for name, tensor in tensors.items():
        like = expected[name]
        require(
            tensor.shape == like.shape and tensor.dtype == like.dtype,
            f"the message has {name} as {list(tensor.shape)} {tensor.dtype}, but it must be {list(like.shape)} "
            f"{like.dtype}.",
        )
