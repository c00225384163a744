"""Checkpoints: a run's state after a round, saved so that the run continues from it with the same bits.

A checkpoint exists once its manifest does, which is renamed into place after everything else has reached the disk. The
file of a client's state never changes. There is no generator state to save: every random number comes from (seed,
purpose, round, client).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch

from fedadc.communication.network import FIGURES
from fedadc.config.settings import Checkpointing
from fedadc.errors import DiskError, RunDamaged, require
from fedadc.fields.summary import summary
from fedadc.models.vectors import State, Vector, canonical
from fedadc.runs.layout import (
    CHECKPOINT_FILE,
    CLIENT_STATE_FILE,
    CLIENT_STATES,
    METRICS,
    checkpoint_name,
    client_state_file,
)
from fedadc.runs.manifest import (
    EMPTY_PREFIX,
    FORMAT,
    FilePrefix,
    Manifest,
    UnusableCheckpoint,
    decode,
    encode,
    read_file,
    read_tensors,
)
from fedadc.server_half import ServerHalf
from fedadc.system.files import checksum, flush_folder, to_safetensors, write_file
from fedadc.training.client_states import ClientStates, StateFile, StateHandle, Store, save_states
from fedadc.training.state import RunState
from fedadc.training.state_files import StateFolder

log = logging.getLogger("fedadc")
SERVER, LINKS, KEPT_BEST = "server.", "links.", "best."  # prefixes of the names of their tensors
KEPT = 2  # checkpoints
LARGEST_SHARE = 0.02  # of a run's time that writing may take


class CheckpointTimer:
    """Decides when the next checkpoint is due."""

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


class Checkpoints:
    """The checkpoints of one run in a folder. In a loop of your own, `config` is any text that names its settings."""

    def __init__(self, folder: str | Path, federation: ServerHalf, config: str = "") -> None:
        self.folder, self.federation, self.config = Path(folder).resolve(), federation, config
        require(self.folder.parent.is_dir(), f"there is no folder {self.folder.parent} for checkpoints.")
        self.states = StateFolder.at(self.folder / CLIENT_STATES, CLIENT_STATE_FILE)
        self.best: tuple[int, Vector] | None = None  # round and vector of the best model so far, saved with the state
        self._kept: list[Manifest] = []  # the newest first

    def __repr__(self) -> str:
        return summary("Checkpoints", {"folder": self.folder, "round": self.round})

    @property
    def last(self) -> Manifest | None:
        """The manifest that was written or read last."""
        return self._kept[0] if self._kept else None

    @property
    def round(self) -> int:
        """The round of the last checkpoint; 0 if there is none."""
        return 0 if self.last is None else self.last.round

    @cached_property
    def data(self) -> str:
        return self.federation.data_checksum()

    def write(self, state: RunState, metrics: FilePrefix = EMPTY_PREFIX) -> None:
        """Save a state of the federation after a round."""
        try:
            self._write(state, metrics)
        except OSError as error:
            raise DiskError(f"cannot write to {self.folder} ({error.strerror or error}).") from error

    def _write(self, state: RunState, metrics: FilePrefix) -> None:
        for folder in (self.folder, self.states.path):
            if not folder.is_dir():
                folder.mkdir()
                flush_folder(folder.parent)
        clients = self._write_states(state.clients)
        best = {} if self.best is None else {str(self.best[0]): self.best[1]}
        groups = {SERVER: state.server, LINKS: state.links, KEPT_BEST: best}
        own = {prefix + name: v for prefix, vectors in groups.items() for name, v in vectors.items()}
        content = to_safetensors({"theta": state.theta, **own})
        write_file(self.folder / f"{checkpoint_name(state.round)}.safetensors", content)
        manifest = Manifest(
            FORMAT, state.round, state.horizon, self.config, self.data, checksum(content), metrics, clients
        )
        write_file(self.folder / f"{checkpoint_name(state.round)}.json", encode(manifest))
        self._kept = [manifest, *(m for m in self._kept if m.round < manifest.round)][:KEPT]
        self._delete_old()

    def _write_states(self, clients: ClientStates) -> list[tuple[int, int, str]]:
        """Save the client states; returns the manifest's list of them."""
        handles = {client: clients.handle(client) for client in clients}
        names = {client: client_state_file(client, handle.round) for client, handle in handles.items()}
        checksums = save_states([(handle, names[client]) for client, handle in handles.items()], self.states)
        return [(client, handle.round, checksums[names[client]]) for client, handle in handles.items()]

    def _delete_old(self) -> None:
        """Delete checkpoints except the last two, and client states that neither names and that have no user."""
        names = {m.name for m in self._kept}
        for file in sorted(self.folder.iterdir()):  # a manifest is deleted before the files it names
            if CHECKPOINT_FILE.fullmatch(file.name) and file.name.partition(".")[0] not in names:
                file.unlink(missing_ok=True)
        self.states.prune({file for m in self._kept for file in m.state_files()})

    def clean_up(self) -> None:
        """Delete what a killed process left: checkpoints before the last two, and client states that none names."""
        found = self._found()
        if len(found) > KEPT:
            self._kept += [m for path, round in found if round < self.round and (m := self._if_good(path))][: KEPT - 1]
            if len(self._kept) == KEPT:
                self._delete_old()
        with suppress(UnusableCheckpoint):  # it is unknown which states a damaged manifest names
            manifests = [decode(read_file(path)) for path, _ in self._found()]
            self.states.prune({file for m in manifests for file in m.state_files()})

    def _if_good(self, path: Path) -> Manifest | None:
        with suppress(UnusableCheckpoint, OSError):
            manifest = self._manifest(path)
            self._state(manifest, self._tensors(manifest))
            return manifest
        return None

    def _found(self) -> list[tuple[Path, int]]:
        """The manifests in the folder and their rounds, the newest first."""
        if not self.folder.is_dir():
            return []
        named = [(path, CHECKPOINT_FILE.fullmatch(path.name)) for path in self.folder.iterdir()]
        found = [(path, int(match[1])) for path, match in named if match and match[2] == ".json" and not match[3]]
        return sorted(found, key=lambda pair: -pair[1])

    def newest(
        self,
        metrics_prefix: Callable[[int], FilePrefix | None] = lambda _: EMPTY_PREFIX,
        warn: Callable[[str], None] = log.warning,
    ) -> RunState | None:
        """The state of the newest good checkpoint; None if there is no checkpoint. Unusable ones are warned of.

        `metrics_prefix(n)` describes the first n bytes of the metrics; None if there are fewer.
        """
        reasons = []
        for path, _ in self._found():
            try:
                manifest = self._manifest(path)
                if metrics_prefix(manifest.metrics.bytes) != manifest.metrics:
                    raise UnusableCheckpoint(
                        f"{METRICS} no longer has the rounds before it (restore it from a copy; a new run can start "
                        "from this run's model with model.weights)"
                    )
                tensors = self._tensors(manifest)
                state = self._state(manifest, tensors)
            except UnusableCheckpoint as error:
                reasons.append(f"{path} cannot be used: {error}")
            except OSError as error:
                reasons.append(f"{path} cannot be read ({error.strerror or error})")
            else:
                for reason in reasons:
                    warn(f"{reason}; continuing from the checkpoint before it")
                self._kept, self.best = [manifest], _best_in(tensors, state.theta)
                return state
        if reasons:
            raise RunDamaged("no checkpoint is usable, and nothing was changed: " + "; ".join(reasons) + ".")
        return None

    def _manifest(self, path: Path) -> Manifest:
        manifest = decode(read_file(path))
        if manifest.name != path.stem:
            raise UnusableCheckpoint(f"it belongs to round {manifest.round}")
        if manifest.config != self.config:
            raise UnusableCheckpoint("it belongs to a run with other settings")
        if manifest.data != self.data:
            raise UnusableCheckpoint("it belongs to other data or weights, or they have changed since")
        return manifest

    def _tensors(self, manifest: Manifest) -> State:
        return read_tensors(self.folder / f"{manifest.name}.safetensors", manifest.state)

    def _state(self, manifest: Manifest, tensors: State) -> RunState:
        start = self.federation.start()
        theta = tensors.get("theta")
        server, links = ({n.removeprefix(p): v for n, v in tensors.items() if n.startswith(p)} for p in (SERVER, LINKS))
        if theta is None or theta.shape != start.theta.shape or theta.dtype != start.theta.dtype:
            raise UnusableCheckpoint("it belongs to another model")
        figures = start.links.get(FIGURES)
        if figures is not None and not torch.equal(figures, links.get(FIGURES, figures[:0])):
            raise UnusableCheckpoint("the clock's figures have changed since (clock.trace)")
        device = start.theta.device
        # copies: torch's own memory is aligned as vectors should be, a file's content is not
        return RunState(
            manifest.round,
            theta.to(device, copy=True),
            canonical({name: v.to(device, copy=True) for name, v in server.items()}),
            self._client_states(manifest),
            manifest.horizon,
            {name: v.clone() for name, v in links.items()},
        )

    def _client_states(self, manifest: Manifest) -> ClientStates:
        """Handles on the files of a manifest, each of which is checked."""
        store = Store(self.federation.storage)
        handles: dict[int, StateHandle] = {}
        for client, round, expected in manifest.clients:
            if not 0 <= client < len(self.federation.coordinator.roster):
                raise UnusableCheckpoint(f"there is no client {client}")
            file = StateFile(self.states, client_state_file(client, round), expected)
            if checksum(read_file(file.path)) != expected:
                raise UnusableCheckpoint(f"{CLIENT_STATES}/{file.name} is truncated or damaged")
            handles[client] = store.keep_saved(file, round)
        return ClientStates(store).updated(handles)


def _best_in(tensors: State, like: Vector) -> tuple[int, Vector] | None:
    """The round and the vector of the best model that a checkpoint has, if it has one."""
    for name, vector in tensors.items():
        round = name.removeprefix(KEPT_BEST)
        if name != round and round.isdecimal() and (vector.shape, vector.dtype) == (like.shape, like.dtype):
            return int(round), vector.to(like.device, copy=True)
    return None


def check_room(free: int, federation: ServerHalf, keeps_best: bool = False) -> None:
    """Refuse a disk without room for one checkpoint, and states that cannot be saved to a file."""
    state = federation.start()
    own = federation.agreement.client_state(state.theta)
    theta, server, each = (len(to_safetensors(v)) for v in ({"theta": state.theta}, state.server, own))
    needed = (4 if keeps_best else 2) * theta + server + (federation.coordinator.cohort * each if own else 0)
    if free < needed:
        raise DiskError(
            f"the disk has {free:,} bytes left, but this run's first checkpoint and model take {needed:,}; make room, "
            "or choose another `out`."
        )
