"""The clients' states between rounds: in memory, and in files once they exceed a budget.

A state never changes. A round makes new ones; those of earlier rounds are kept while a handle on them exists, so
a run can continue from any of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from fedadc.errors import DiskError, FedadcError, kind_of_failure, require
from fedadc.fields.settings import Settings
from fedadc.models.vectors import DistantState, State, canonical
from fedadc.system.files import checksum, to_safetensors, write_files
from fedadc.training.state_files import StateFolder

BUCKET = 1024  # clients; a round copies the buckets it touches, so its cost does not grow with the clients


@dataclass(frozen=True, kw_only=True)
class Storage(Settings):
    """Where the clients' states are kept."""

    memory_gb: float = 2.0  # GB of states in memory; beyond it the oldest go to files
    folder: str | None = None  # for the files; None: the run directory, or the system's temporary folder

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.memory_gb >= 0, f"memory_gb must be at least 0, not {self.memory_gb}.")


class StateFile(NamedTuple):
    """The file of a state."""

    folder: StateFolder
    name: str
    checksum: str | None = None  # only of a file that outlives the process

    @property
    def path(self) -> Path:
        return self.folder.path / self.name


class StateHandle:
    """A reference to one client's state after one round. The store keeps the state while the handle exists."""

    __slots__ = ("round", "serial", "store")

    def __init__(self, store: Store, serial: int, round: int) -> None:
        self.store, self.serial, self.round = store, serial, round

    def __del__(self) -> None:
        self.store.forget(self.serial)


class Store:
    """Keeps states while their handles exist: the newest in memory, up to the budget, the others in files."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.used = 0  # bytes in memory
        self._serial = 0
        self._memory: dict[int, tuple[State | DistantState, int]] = {}  # by serial, oldest first: state and bytes
        self._files: dict[int, StateFile] = {}  # by serial; a state may be in memory too

    def keep(self, state: State | DistantState, round: int = 0) -> StateHandle:
        handle = self._handle(round)
        if isinstance(state, DistantState):
            size = state.size
        else:
            state = canonical({key: value.cpu() for key, value in state.items()})
            size = sum(v.numel() * v.element_size() for v in state.values())
        self._memory[handle.serial] = (state, size)
        self.used += size
        while self.used > self.storage.memory_gb * 1e9:
            self._move_oldest_to_file()
        return handle

    def keep_saved(self, file: StateFile, round: int) -> StateHandle:
        """A handle on a state that is in a file already."""
        handle = self._handle(round)
        self._set_file(handle.serial, file)
        return handle

    def _handle(self, round: int) -> StateHandle:
        self._serial += 1
        return StateHandle(self, self._serial, round)

    def read(self, handle: StateHandle) -> State:
        if handle.serial in self._memory:
            return self._memory[handle.serial][0]  # type: ignore[return-value]  # a distant one has the same methods
        from safetensors.torch import load

        path = self._files[handle.serial].path
        try:
            return canonical(load(path.read_bytes()))  # load_file would map it: the number of maps is limited
        except Exception as error:  # deleted, or a disk error
            raise kind_of_failure(error)(f"the client state {path} cannot be read back ({error}).") from error

    def checksum(self, handle: StateHandle, path: Path) -> str | None:
        """The checksum of a state that is saved under this path; None if it is not."""
        file = self._files.get(handle.serial)
        return file.checksum if file is not None and file.path == path else None

    def content(self, handle: StateHandle) -> bytes:
        """A state as a file has it."""
        in_memory = self._memory.get(handle.serial)
        return self._files[handle.serial].path.read_bytes() if in_memory is None else to_safetensors(in_memory[0])

    def set_saved(self, handle: StateHandle, file: StateFile) -> None:
        self._set_file(handle.serial, file)

    @cached_property
    def _folder(self) -> StateFolder:
        return StateFolder.make_temporary(self.storage.folder)

    def _move_oldest_to_file(self) -> None:
        serial, (state, size) = next(iter(self._memory.items()))
        if serial not in self._files:
            try:
                file = StateFile(self._folder, f"{serial}.safetensors")
                file.path.write_bytes(to_safetensors(state))
            except Exception as error:  # a full disk, a folder that is gone; safetensors has errors of its own
                folder = self.storage.folder or tempfile.gettempdir()
                kind = DiskError if isinstance(error, OSError) else FedadcError
                raise kind(f"a client state cannot be written to {folder} (storage.folder): {error}.") from error
            self._set_file(serial, file)
            if serial not in self._memory:  # its last handle was deleted in the meantime
                self._drop_file(serial)
                return
        del self._memory[serial]
        self.used -= size

    def forget(self, serial: int) -> None:
        if serial in self._memory:
            _, size = self._memory.pop(serial)
            self.used -= size
        self._drop_file(serial)

    def _set_file(self, serial: int, file: StateFile) -> None:
        file.folder.use(file.name)
        self._drop_file(serial)
        self._files[serial] = file

    def _drop_file(self, serial: int) -> None:
        file = self._files.pop(serial, None)
        if file is not None:
            file.folder.release(file.name)


def save_states(wanted: Collection[tuple[StateHandle, str]], folder: StateFolder) -> dict[str, str]:
    """Write states to files of these names that outlive the process; returns the checksum of each."""
    checksums: dict[str, str] = {}
    missing = []
    for handle, name in wanted:
        known = handle.store.checksum(handle, folder.path / name)
        if known is None:
            missing.append((handle, name))
        else:
            checksums[name] = known

    def contents() -> Iterator[tuple[Path, bytes]]:
        for handle, name in missing:
            content = handle.store.content(handle)
            checksums[name] = checksum(content)
            yield folder.path / name, content

    write_files(contents())
    for handle, name in missing:
        handle.store.set_saved(handle, StateFile(folder, name, checksums[name]))
    return checksums


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

    def counted(self, client: int) -> int:
        """The round after which a client's state took effect; 0: it has none."""
        return self.handle(client).round if client in self else 0

    def handle(self, client: int) -> StateHandle:
        return self._buckets.get(client // BUCKET, {})[client]

    def __contains__(self, client: object) -> bool:
        return isinstance(client, Integral) and client in self._buckets.get(int(client) // BUCKET, {})

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(client for bucket in self._buckets.values() for client in bucket))

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __repr__(self) -> str:
        return f"<states of {len(self)} clients>"

    def __reduce__(self) -> tuple[Any, ...]:
        states = {client: (state, self.handle(client).round) for client, state in self.items()}
        return _states, (self.store.storage, states)  # a copy has a store of its own


def _states(storage: Storage, states: Mapping[int, tuple[State, int]]) -> ClientStates:
    store = Store(storage)
    return ClientStates(store).updated({client: store.keep(*state) for client, state in states.items()})
