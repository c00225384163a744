"""Folders of client-state files. Every deletion of such a file is decided here, in `StateFolder._delete_unused`.

There are two kinds of folder. A temporary one has the states that do not fit in memory; a file in it is deleted as soon
as nobody uses its state. The folder of a run's checkpoints is only pruned by the process that writes the run; a file in
it is kept while a checkpoint names it or somebody uses its state.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from weakref import WeakValueDictionary

FOLDER_PREFIX = "fedadc-states-"  # of temporary folders
TEMPORARY_FILE = re.compile(r"\d+\.safetensors")
CHECKPOINT_FILE = re.compile(r"\d+-\d+\.safetensors(\.part)?")  # client-round; all other files are left alone


class StateFolder:
    """Counts the users of each file, and deletes files that nobody needs."""

    def __init__(self, path: Path, temporary: bool = False) -> None:
        self.path, self.temporary = path, temporary
        self._users: Counter[str] = Counter()
        self._owner = os.getpid()  # a forked copy must not delete files
        if temporary:
            weakref.finalize(self, _remove_tree, path, self._owner)

    @classmethod
    def at(cls, path: Path) -> StateFolder:
        """The folder of a run's checkpoints: one object per process, so that all users of a file are known to it."""
        known = _FOLDERS.get(path)
        if known is None or known._owner != os.getpid():
            known = _FOLDERS[path] = cls(path)
        return known

    @classmethod
    def make_temporary(cls, parent: str | None) -> StateFolder:
        """A new folder, in `parent` or else where the system keeps temporary files; it goes with this object."""
        where = Path(parent).resolve() if parent else None
        return cls(Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=where)), temporary=True)

    def use(self, name: str) -> None:
        self._users[name] += 1

    def release(self, name: str) -> None:
        self._users[name] -= 1
        if self._users[name] <= 0:
            del self._users[name]
        if self.temporary:
            self._delete_unused(name)

    def prune(self, named: Collection[str]) -> None:
        """Delete the states that no checkpoint names and nobody uses."""
        for file in self.path.iterdir() if self.path.is_dir() else ():
            if file.name not in named:
                self._delete_unused(file.name)

    def _delete_unused(self, name: str) -> None:
        ours = (TEMPORARY_FILE if self.temporary else CHECKPOINT_FILE).fullmatch(name)
        if ours and name not in self._users and os.getpid() == self._owner:
            (self.path / name).unlink(missing_ok=True)


_FOLDERS: WeakValueDictionary[Path, StateFolder] = WeakValueDictionary()


def remove_temporary_folders(parent: Path) -> None:
    """Delete the temporary folders that killed processes left in a folder."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)


def _remove_tree(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
