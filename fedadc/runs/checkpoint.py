"""Checkpoints: all that a run needs to go on with the same bits, in safetensors and JSON.

    checkpoints/round-00000120.json          the manifest: what belongs to the checkpoint, with checksums
    checkpoints/round-00000120.safetensors   theta and the server's state
    checkpoints/clients/7-118.safetensors    the state of client 7 after round 118

A checkpoint is there once its manifest is, and that is renamed into its place when all else has reached the disk. A
client's file never changes; it is deleted when neither of the last two checkpoints names it. There is no generator
state: every random number comes from (seed, purpose, round, client).
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from weakref import WeakSet

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedadc.communication.network import FIGURES
from fedadc.config.settings import Checkpointing
from fedadc.errors import CannotResume, FedadcError, one_line, require
from fedadc.federation import Federation
from fedadc.models.vectors import State, canonical
from fedadc.runs.layout import CHECKPOINT_FILE, CLIENT_STATE_FILE, CLIENT_STATES, checkpoint_name, client_state_file
from fedadc.system.files import checksum, flush_folder, to_safetensors, write_file
from fedadc.training.client_states import ClientStates, SavedState, StateHandle, Store, save_all
from fedadc.training.state import RunState

log = logging.getLogger("fedadc")
FORMAT = 1
SERVER, LINKS = "server.", "links."  # how the names of their tensors begin
KEPT = 2
LARGEST_SHARE = 0.02  # of a run's time that writing may take


class CheckpointTimer:
    """Says when the next checkpoint is due."""

    def __init__(self, settings: Checkpointing) -> None:
        self.settings = settings
        self._last, self._cost = time.monotonic(), 0.0

    def due(self, round: int) -> bool:
        if self.settings.every is not None:
            return round % self.settings.every == 0
        return time.monotonic() - self._last >= max(self.settings.seconds, self._cost / LARGEST_SHARE)

    def took(self, began: float) -> None:
        self._last = time.monotonic()
        self._cost = self._last - began


@dataclass(frozen=True)
class FilePrefix:
    """How far another file of the run had come, and what it held up to there."""

    bytes: int
    checksum: str


EMPTY_PREFIX = FilePrefix(0, "")


@dataclass(frozen=True)
class Manifest:
    """What belongs to a checkpoint. Names of files follow from numbers, so none can lead elsewhere."""

    format: int
    round: int
    horizon: int
    config: str  # checksum of the settings that decide the result
    data: str  # checksum of the samples, of who holds them, and of what a model has that is not trained
    state: str  # checksum of the file with theta and the server's state
    metrics: FilePrefix
    clients: list[tuple[int, int, str]]  # client, round of its state, checksum of its file

    @property
    def name(self) -> str:
        return checkpoint_name(self.round)

    def files(self) -> list[str]:
        """Of its clients' states."""
        return [client_state_file(client, round) for client, round, _ in self.clients]


class UnusableCheckpoint(Exception):
    """Why a checkpoint cannot be used."""


class Checkpoints:
    """The checkpoints of one run in a folder. In a loop of your own, `config` is any text that names its settings."""

    def __init__(self, folder: str | Path, federation: Federation, config: str = "") -> None:
        self.folder, self.federation, self.config = Path(folder).resolve(), federation, config
        require(self.folder.parent.is_dir(), f"there is no folder {self.folder.parent} for checkpoints.")
        self._kept: list[Manifest] = []  # the newest first
        self._stores: WeakSet[Store] = WeakSet()  # whose states are in files here, also those of rounds before

    @property
    def last(self) -> Manifest | None:
        """Written or read."""
        return self._kept[0] if self._kept else None

    @property
    def round(self) -> int:
        """Of the last checkpoint; 0 if there is none."""
        return 0 if self.last is None else self.last.round

    @cached_property
    def data(self) -> str:
        return _data_checksum(self.federation)

    def write(self, state: RunState, metrics: FilePrefix = EMPTY_PREFIX) -> None:
        """Save a state of the federation after a round."""
        try:
            self._write(state, metrics)
        except OSError as error:
            raise FedadcError(f"cannot write to {self.folder} ({error.strerror or error}).") from error

    def _write(self, state: RunState, metrics: FilePrefix) -> None:
        for folder in (self.folder, self.folder / CLIENT_STATES):
            if not folder.is_dir():
                folder.mkdir()
                flush_folder(folder.parent)
        clients = self._save(state.clients)
        content = to_safetensors({"theta": state.theta, **_under(SERVER, state.server), **_under(LINKS, state.links)})
        write_file(self.folder / f"{checkpoint_name(state.round)}.safetensors", content)
        manifest = Manifest(
            FORMAT, state.round, state.horizon, self.config, self.data, checksum(content), metrics, clients
        )
        write_file(self.folder / f"{checkpoint_name(state.round)}.json", _encoded(manifest))
        self._kept = [manifest, *(m for m in self._kept if m.round < manifest.round)][:KEPT]
        self._forget_others()

    def _save(self, clients: ClientStates) -> list[tuple[int, int, str]]:
        """The part of the manifest that names the clients' files."""
        wanted = {}
        for client in clients:
            entry = clients.handle(client)
            self._stores.add(entry.store)
            wanted[client] = entry, self.folder / CLIENT_STATES / client_state_file(client, entry.round)
        marks = save_all(wanted.values())
        return [(client, entry.round, marks[path]) for client, (entry, path) in wanted.items()]

    def _forget_others(self) -> None:
        """Delete checkpoints but the last two, and states that neither names and nobody holds."""
        names = {m.name for m in self._kept}
        for file in sorted(self.folder.iterdir()):  # a manifest goes before what it names
            if CHECKPOINT_FILE.fullmatch(file.name) and file.name.partition(".")[0] not in names:
                file.unlink(missing_ok=True)
        held = {f for store in self._stores for f in store.saved_files(self.folder / CLIENT_STATES)}
        self._forget_states_but({f for m in self._kept for f in m.files()} | held)

    def _forget_states_but(self, kept: set[str]) -> None:
        for file in (self.folder / CLIENT_STATES).iterdir():
            if CLIENT_STATE_FILE.fullmatch(file.name) and file.name not in kept:
                file.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete what a killed process was about to: checkpoints before the last two, and states that none names."""
        found = self._found()
        if len(found) > KEPT:
            self._kept += [m for path, round in found if round < self.round and (m := self._if_good(path))][: KEPT - 1]
            if len(self._kept) == KEPT:
                self._forget_others()
        if (self.folder / CLIENT_STATES).is_dir():
            with suppress(UnusableCheckpoint):  # who knows what a damaged one names
                manifests = [_decoded(_content(path)) for path, _ in self._found()]
                self._forget_states_but({f for m in manifests for f in m.files()})

    def _if_good(self, path: Path) -> Manifest | None:
        with suppress(UnusableCheckpoint, OSError):
            manifest = self._manifest(path)
            self._state(manifest)
            return manifest
        return None

    def _found(self) -> list[tuple[Path, int]]:
        """The manifests here and their rounds, the newest first."""
        if not self.folder.is_dir():
            return []
        found = [
            (p, int(m[1]))
            for p in self.folder.iterdir()
            if (m := CHECKPOINT_FILE.fullmatch(p.name)) and m[2] == ".json"
        ]
        return sorted(found, key=lambda pair: -pair[1])

    def newest(
        self,
        metrics_of: Callable[[int], FilePrefix | None] = lambda _: EMPTY_PREFIX,
        warn: Callable[[str], None] = log.warning,
    ) -> RunState | None:
        """The state of the newest good one; None if there is none at all. Those that are not are named in warnings.

        `metrics_of(bytes)` is the mark of the first so many bytes of the metrics, if there are so many.
        """
        reasons = []
        for path, _ in self._found():
            try:
                manifest = self._manifest(path)
                if metrics_of(manifest.metrics.bytes) != manifest.metrics:
                    raise UnusableCheckpoint(
                        "metrics.jsonl no longer holds the rounds before it (bring it back from a copy; a new run can "
                        "start from this one's model with model.weights)"
                    )
                state = self._state(manifest)
            except UnusableCheckpoint as error:
                reasons.append(f"{path} cannot be used: {error}")
            except OSError as error:
                reasons.append(f"{path} cannot be read ({error.strerror or error})")
            else:
                for reason in reasons:
                    warn(f"{reason}; going on from the one before")
                self._kept = [manifest]
                return state
        if reasons:
            raise CannotResume("no checkpoint is good, and nothing was changed: " + "; ".join(reasons) + ".")
        return None

    def _manifest(self, path: Path) -> Manifest:
        manifest = _decoded(_content(path))
        if manifest.name != path.stem:
            raise UnusableCheckpoint(f"it is of round {manifest.round}")
        if manifest.config != self.config:
            raise UnusableCheckpoint("it belongs to a run with other settings")
        if manifest.data != self.data:
            raise UnusableCheckpoint("it belongs to other data or weights, or they have changed since")
        return manifest

    def _state(self, manifest: Manifest) -> RunState:
        start = self.federation.start()
        tensors = _tensors(self.folder / f"{manifest.name}.safetensors", manifest.state)
        theta = tensors.pop("theta", None)
        server, links = ({n.removeprefix(p): v for n, v in tensors.items() if n.startswith(p)} for p in (SERVER, LINKS))
        if theta is None or theta.shape != start.theta.shape or theta.dtype != start.theta.dtype:
            raise UnusableCheckpoint("it is of another model")
        figures = start.links.get(FIGURES)
        if figures is not None and not torch.equal(figures, links.get(FIGURES, figures[:0])):
            raise UnusableCheckpoint("the clock's figures have changed since (clock.trace)")
        device, store = start.theta.device, Store(self.federation.storage)
        clients: dict[int, StateHandle] = {}
        for client, round, mark in manifest.clients:
            if not 0 <= client < len(self.federation.clients):
                raise UnusableCheckpoint(f"there is no client {client}")
            path = self.folder / CLIENT_STATES / client_state_file(client, round)
            if checksum(_content(path)) != mark:
                raise UnusableCheckpoint(f"{CLIENT_STATES}/{path.name} is truncated or damaged")
            clients[client] = store.keep_saved(SavedState(path, mark), round)
        # clones: torch's own memory begins where vectors should, a file's content anywhere
        return RunState(
            manifest.round,
            theta.to(device, copy=True),
            canonical({name: v.to(device, copy=True) for name, v in server.items()}),
            ClientStates(store).updated(clients),
            manifest.horizon,
            {name: v.clone() for name, v in links.items()},
        )


def _under(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def _encoded(manifest: Manifest) -> bytes:
    tree = asdict(manifest)
    return json.dumps({"checksum": checksum(_canonical(tree)), "manifest": tree}).encode()


def _decoded(content: bytes) -> Manifest:
    try:
        sealed = json.loads(content)
        tree, seal = sealed["manifest"], sealed["checksum"]
        version = tree["format"]
        whole = checksum(_canonical(tree)) == seal
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnusableCheckpoint("it is truncated or damaged") from None
    if version != FORMAT:
        raise UnusableCheckpoint(f"its format is {version!r:.20}, this version of fedadc reads {FORMAT}")
    if not whole:
        raise UnusableCheckpoint("it is damaged: its checksum is wrong")
    try:
        return TypeAdapter(Manifest).validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise UnusableCheckpoint(f"it is no manifest of ours ({one_line(error)[:100]})") from None


def _canonical(tree: object) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _tensors(path: Path, mark: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = _content(path)
    if checksum(content) != mark:
        raise UnusableCheckpoint(f"{path.name} is truncated, damaged or of another checkpoint")
    try:
        tensors: dict[str, Tensor] = load(content)
    except SafetensorError as error:
        raise UnusableCheckpoint(f"{path.name} is no safetensors file ({one_line(error)})") from None
    return tensors


def _content(path: Path) -> bytes:
    if not path.is_file():  # a pipe would never end
        raise UnusableCheckpoint(f"{path.name} is missing, or not a file")
    return path.read_bytes()


def _data_checksum(federation: Federation) -> str:
    """Of all samples, of who holds them, and of what a model has that is not trained."""
    digest = hashlib.sha256()
    for name, samples in federation.data.splits().items():
        for tensor in (samples.x, samples.y):
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.cpu().contiguous().view(-1).numpy().data)
    for array in (federation.clients.indices, federation.clients.offsets):
        digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
    digest.update(to_safetensors(federation.model.fixed()))
    return digest.hexdigest()


def check_room(free: int, federation: Federation) -> None:
    """Refuse a disk that cannot even hold one checkpoint, and states that no file can hold."""
    state = federation.start()
    own = federation.context.client_state(state.theta)
    theta, server, each = (len(to_safetensors(v)) for v in ({"theta": state.theta}, state.server, own))
    needed = 2 * theta + server + (federation.cohort * each if own else 0)
    if free < needed:
        raise FedadcError(
            f"the disk has {free:,} bytes left, but this run's first checkpoint and model take {needed:,}; make room, "
            "or choose another --out."
        )
