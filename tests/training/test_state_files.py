"""Files of client states: deleted when nobody needs them, never before, and only by the process that made them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

import fedadc
from fedadc.runs.layout import CLIENT_STATE_FILE
from fedadc.training.client_states import Storage, Store, save_states
from fedadc.training.state_files import FOLDER_PREFIX, StateFolder, remove_temporary_folders


def put(folder: StateFolder, *names: str) -> None:
    for name in names:
        (folder.path / name).write_bytes(b"state")


def names(folder: StateFolder) -> set[str]:
    return {file.name for file in folder.path.iterdir()}


def test_a_temporary_file_is_deleted_with_its_last_user(tmp_path: Path) -> None:
    folder = StateFolder.make_temporary(str(tmp_path))
    put(folder, "1.safetensors", "2.safetensors")
    for _ in range(2):
        folder.use("1.safetensors")
    folder.use("2.safetensors")
    folder.release("1.safetensors")
    assert names(folder) == {"1.safetensors", "2.safetensors"}
    folder.release("1.safetensors")
    assert names(folder) == {"2.safetensors"}
    path = folder.path
    del folder
    gc.collect()
    assert not path.exists()


def test_a_checkpoints_file_is_deleted_only_by_pruning_and_only_if_neither_named_nor_used(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, CLIENT_STATE_FILE)
    put(folder, "0-1.safetensors", "1-1.safetensors", "2-1.safetensors", "3-1.safetensors.part", "notes.txt")
    folder.use("0-1.safetensors")
    folder.use("1-1.safetensors")
    folder.release("1-1.safetensors")
    assert len(names(folder)) == 5  # a release deletes nothing here
    folder.prune(named={"2-1.safetensors"})
    assert names(folder) == {"0-1.safetensors", "2-1.safetensors", "notes.txt"}  # used, named, not ours
    folder.release("0-1.safetensors")
    folder.prune(named=())
    assert names(folder) == {"notes.txt"}


def test_a_forked_copy_deletes_nothing(tmp_path: Path) -> None:
    folder = StateFolder.make_temporary(str(tmp_path))
    put(folder, "1.safetensors")
    folder.use("1.safetensors")
    child = os.fork()
    if child == 0:
        folder.release("1.safetensors")
        folder.prune(named=())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert names(folder) == {"1.safetensors"}


def test_a_saved_state_gives_up_its_temporary_file_and_is_not_written_twice(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    store, saved = Store(Storage(memory_gb=0, folder=str(tmp_path))), StateFolder(tmp_path / "saved", CLIENT_STATE_FILE)
    handle = store.keep({"h": torch.arange(3.0)}, round=4)
    (temporary,) = tmp_path.glob(f"{FOLDER_PREFIX}*")
    assert len(list(temporary.iterdir())) == 1
    first = save_states([(handle, "7-4.safetensors")], saved)
    assert list(temporary.iterdir()) == [] and names(saved) == {"7-4.safetensors"}
    written = (saved.path / "7-4.safetensors").stat().st_mtime_ns
    assert save_states([(handle, "7-4.safetensors")], saved) == first
    assert (saved.path / "7-4.safetensors").stat().st_mtime_ns == written
    saved.prune(named=())
    assert torch.equal(store.read(handle)["h"], torch.arange(3.0))  # used, so not pruned
    del handle
    saved.prune(named=())
    assert names(saved) == set()


def test_an_earlier_result_keeps_its_states_while_the_run_is_extended(tmp_path: Path) -> None:
    config = {
        "rounds": 2,
        "data": {"name": "digits", "clients": 4},
        "model": "logistic",
        "method": "scaffold",
        "local": {"steps": 1},
        "checkpoint": {"every": 1},
        "storage": {"memory_gb": 0},
    }
    first = fedadc.run(config, out=tmp_path / "run")
    before = {client: state["c"].clone() for client, state in first.state.clients.items()}
    fedadc.resume(tmp_path / "run", "rounds=6")
    assert all(torch.equal(first.state.clients[client]["c"], c) for client, c in before.items())
    files = set((tmp_path / "run" / "checkpoints" / "clients").iterdir())
    del first
    gc.collect()
    fedadc.resume(tmp_path / "run", "rounds=7")
    assert not {f for f in files if f.exists() and f.name.endswith("-2.safetensors")}


def test_folders_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / f"{FOLDER_PREFIX}killed").mkdir()
    (tmp_path / f"{FOLDER_PREFIX}killed" / "1.safetensors").touch()
    (tmp_path / f"{FOLDER_PREFIX}notes.txt").touch()
    (tmp_path / "data").mkdir()
    remove_temporary_folders(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {f"{FOLDER_PREFIX}notes.txt", "data"}
