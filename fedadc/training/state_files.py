"""Folders of client-state files. Whether such a file may be deleted is decided here, in `StateFolder._delete_unused`.

There are two kinds of folder. A temporary one has the states that do not fit in memory; a file in it is deleted as soon
as its state has no user. The folder of a run's checkpoints is only pruned by the process that writes the run; a file in
it is kept while a checkpoint names it or its state has a user.
"""

from __future__ import annotations

import os
import re
import tempfile
import weakref
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

FOLDER_PREFIX = "fedadc-states-"  # of temporary folders
TEMPORARY_FILE = re.compile(r"\d+\.safetensors")


class StateFolder:
    """Counts the users of each file, and deletes files without a user. Files of other names are left alone."""

    def __init__(self, path: Path, pattern: re.Pattern[str], temporary: bool = False) -> None:
        self.path, self.pattern, self.temporary = path, pattern, temporary
        self._users: Counter[str] = Counter()
        self._owner = os.getpid()  # a forked copy must not delete files
        if temporary:
            weakref.finalize(self, _remove_folder, path, self._owner)

    @classmethod
    def at(cls, path: Path, pattern: re.Pattern[str]) -> StateFolder:
        """The folder of a run's checkpoints: one object per process, so that all users of a file are known to it."""
        known = _FOLDERS.get(path)
        if known is None or known._owner != os.getpid():
            known = _FOLDERS[path] = cls(path, pattern)
        return known

    @classmethod
    def make_temporary(cls, parent: str | None) -> StateFolder:
        """A new folder, in `parent` or else where the system keeps temporary files; it goes with this object."""
        where = Path(parent).resolve() if parent else None
        return cls(Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=where)), TEMPORARY_FILE, temporary=True)

    def use(self, name: str) -> None:
        self._users[name] += 1

    def release(self, name: str) -> None:
        self._users[name] -= 1
        if self._users[name] <= 0:
            del self._users[name]
        if self.temporary:
            self._delete_unused(name)

    def prune(self, named: Collection[str]) -> None:
        """Delete the states that no checkpoint names and that have no user."""
        for file in self.path.iterdir() if self.path.is_dir() else ():
            if file.name not in named:
                self._delete_unused(file.name)

    def _delete_unused(self, name: str) -> None:
        if self.pattern.fullmatch(name) and name not in self._users and os.getpid() == self._owner:
            (self.path / name).unlink(missing_ok=True)


_FOLDERS: WeakValueDictionary[Path, StateFolder] = WeakValueDictionary()


def remove_temporary_folders(parent: Path) -> None:
    """Delete the temporary folders that killed processes left in a folder."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        if folder.is_dir():
            _remove_folder(folder, os.getpid())


def _remove_folder(path: Path, owner: int) -> None:
    """Delete the states in a temporary folder, then the folder, unless it has other files."""
    with suppress(OSError):
        if os.getpid() == owner:
            StateFolder(path, TEMPORARY_FILE).prune(named=())
            path.rmdir()
