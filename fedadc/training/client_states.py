"""The clients' states between rounds: values in memory, and in files once they outgrow a budget.

A state never changes: a round makes new ones, and those of earlier rounds live on while somebody holds them, so a run
can go on from any of them. What nobody holds is forgotten, file and all; only files that a checkpoint has asked for
(`save_all`) are its own to delete.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from fedadc.errors import FedadcError, require
from fedadc.models.vectors import State, canonical
from fedadc.system.files import checksum, to_safetensors, write_files

BUCKET = 1024  # clients; a round copies the buckets it touches, so its cost does not grow with the clients
FOLDER_PREFIX = "fedadc-states-"  # of the folder with the files


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Where the clients' states are kept."""

    memory_gb: float = 2.0  # GB of states in memory; beyond it the oldest go to files
    folder: str | None = None  # for the files; None: the run directory, or the system's temporary folder

    def __post_init__(self) -> None:
        require(self.memory_gb >= 0, f"storage.memory_gb must not be negative, not {self.memory_gb}.")


class SavedState(NamedTuple):
    """A state in a file that outlives the process."""

    path: Path
    checksum: str


class StateHandle:
    """A handle on one client's state after one round."""

    __slots__ = ("round", "serial", "store")

    def __init__(self, store: Store, serial: int, round: int) -> None:
        self.store, self.serial, self.round = store, serial, round

    def __del__(self) -> None:
        self.store.forget(self.serial)


class Store:
    """Keeps states until their handles are gone: the newest in memory, up to the budget, the others in files."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.used = 0  # bytes in memory
        self._serial = 0
        self._memory: dict[int, tuple[State, int]] = {}  # by serial, oldest first: state and bytes
        self._files: dict[int, Path] = {}
        self._saved: dict[int, SavedState] = {}  # in memory or not
        self._owner = os.getpid()  # a forked copy must not delete files

    def keep(self, state: State, round: int = 0) -> StateHandle:
        handle = self._handle(round)
        state = canonical({key: value.cpu() for key, value in state.items()})
        size = sum(v.numel() * v.element_size() for v in state.values())
        self._memory[handle.serial] = (state, size)
        self.used += size
        while self.used > self.storage.memory_gb * 1e9:
            self._write_oldest()
        return handle

    def keep_saved(self, saved: SavedState, round: int) -> StateHandle:
        """A state that is in a file already."""
        handle = self._handle(round)
        self._saved[handle.serial] = saved
        return handle

    def _handle(self, round: int) -> StateHandle:
        self._serial += 1
        return StateHandle(self, self._serial, round)

    def read(self, handle: StateHandle) -> State:
        if handle.serial in self._memory:
            return self._memory[handle.serial][0]
        from safetensors.torch import load

        path = self._path(handle.serial)
        try:
            return canonical(load(path.read_bytes()))  # load_file maps the file: there are only so many maps
        except Exception as error:  # deleted, or a disk that fails
            raise FedadcError(f"the client state {path} cannot be read back ({error}).") from error

    def _path(self, serial: int) -> Path:
        return self._saved[serial].path if serial in self._saved else self._files[serial]

    def saved(self, handle: StateHandle) -> SavedState | None:
        """The file that lasts of a state, if it has one."""
        return self._saved.get(handle.serial)

    def content(self, handle: StateHandle) -> bytes:
        """A state as a file has it."""
        in_memory = self._memory.get(handle.serial)
        return self._path(handle.serial).read_bytes() if in_memory is None else to_safetensors(in_memory[0])

    def saved_files(self, folder: Path) -> set[str]:
        """Those in a folder that somebody's states are in."""
        return {saved.path.name for saved in self._saved.values() if saved.path.parent == folder}

    def set_saved(self, handle: StateHandle, saved: SavedState) -> None:
        self._saved[handle.serial] = saved
        self._drop_file(handle.serial)

    @cached_property
    def _folder(self) -> Path:
        place = self.storage.folder and Path(self.storage.folder).resolve()
        folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=place)
        weakref.finalize(self, _remove, folder, self._owner)
        return Path(folder)

    def _write_oldest(self) -> None:
        serial, (state, size) = next(iter(self._memory.items()))
        if serial not in self._saved:
            try:
                path = self._folder / f"{serial}.safetensors"
                path.write_bytes(to_safetensors(state))
            except Exception as error:  # a full disk, a folder that is gone; safetensors has errors of its own
                place = self.storage.folder or tempfile.gettempdir()
                raise FedadcError(f"a client state cannot be written to {place} (storage.folder): {error}.") from error
            if serial not in self._memory:  # its last holder went in the meantime
                path.unlink(missing_ok=True)
                return
            self._files[serial] = path
        del self._memory[serial]
        self.used -= size

    def forget(self, serial: int) -> None:
        if serial in self._memory:
            _, size = self._memory.pop(serial)
            self.used -= size
        self._saved.pop(serial, None)
        self._drop_file(serial)

    def _drop_file(self, serial: int) -> None:
        if serial in self._files and os.getpid() == self._owner:
            self._files.pop(serial).unlink(missing_ok=True)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def save_all(wanted: Collection[tuple[StateHandle, Path]]) -> dict[Path, str]:
    """See to it that states are in these files, which last; the checksum of each."""
    marks: dict[Path, str] = {}
    todo = []
    for handle, path in wanted:
        saved = handle.store.saved(handle)
        if saved is not None and saved.path == path:
            marks[path] = saved.checksum
        else:
            todo.append((handle, path))

    def contents() -> Iterator[tuple[Path, bytes]]:
        for handle, path in todo:
            content = handle.store.content(handle)
            marks[path] = checksum(content)
            yield path, content

    write_files(contents())
    for handle, path in todo:
        handle.store.set_saved(handle, SavedState(path, marks[path]))
    return marks


class ClientStates(Mapping[int, State]):
    """The states of all clients that have one, after some round. It never changes; `updated` makes the next."""

    def __init__(self, store: Store, buckets: Mapping[int, Mapping[int, StateHandle]] | None = None) -> None:
        self.store = store
        self._buckets = buckets or {}

    def kept_in(self, storage: Storage) -> ClientStates:
        """The same states, with new ones to be kept elsewhere."""
        return self if self.store.storage == storage else ClientStates(Store(storage), self._buckets)

    def updated(self, changes: Mapping[int, StateHandle]) -> ClientStates:
        touched: dict[int, dict[int, StateHandle]] = {}
        for client, handle in changes.items():
            number = client // BUCKET
            if number not in touched:
                touched[number] = dict(self._buckets.get(number, {}))
            touched[number][client] = handle
        return ClientStates(self.store, {**self._buckets, **touched})

    def __getitem__(self, client: int) -> State:
        handle = self.handle(client)
        return handle.store.read(handle)

    def handle(self, client: int) -> StateHandle:
        return self._buckets.get(client // BUCKET, {})[client]

    def __contains__(self, client: object) -> bool:
        return isinstance(client, Integral) and client in self._buckets.get(int(client) // BUCKET, {})

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(client for bucket in self._buckets.values() for client in bucket))

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        states = {client: (state, self.handle(client).round) for client, state in self.items()}
        return _states, (self.store.storage, states)  # a copy has a store of its own


def _states(storage: Storage, states: Mapping[int, tuple[State, int]]) -> ClientStates:
    store = Store(storage)
    return ClientStates(store).updated({client: store.keep(*state) for client, state in states.items()})
