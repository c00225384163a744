"""The states of a client on its site's disk, one file for every round that may still be gone back to.

A file's name has its round and the beginning of its checksum, so a damaged file is noticed when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from safetensors.torch import load

from fedadc.errors import RunDamaged, require
from fedadc.models.vectors import State, canonical
from fedadc.system.files import checksum, to_safetensors, write_file

FILE = re.compile(r"round-(\d{8})-([0-9a-f]{16})\.safetensors")
CHECKED = 16  # characters of a checksum


class SiteStates(MutableMapping[int, State]):
    """States by round, as `Client` keeps them. A state is on the disk before the upload of its round is sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _files(self) -> dict[int, Path]:
        found = self.folder.glob("round-*.safetensors") if self.folder.is_dir() else ()
        return {int(match[1]): path for path in found if (match := FILE.fullmatch(path.name))}

    def __getitem__(self, round: int) -> State:
        path = self._files()[round]
        content = path.read_bytes()
        require(checksum(content)[:CHECKED] == path.stem.rpartition("-")[2], f"{path} is damaged.", RunDamaged)
        return canonical(load(content))

    def __contains__(self, round: object) -> bool:
        return round in self._files()

    def __setitem__(self, round: int, state: State) -> None:
        content = to_safetensors(state)
        path = self.folder / f"round-{round:08d}-{checksum(content)[:CHECKED]}.safetensors"
        old = self._files().get(round)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
        if old is not None and old != path:  # of a round that is trained again, from another state
            old.unlink()

    def __delitem__(self, round: int) -> None:
        self._files()[round].unlink()

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._files()))

    def __len__(self) -> int:
        return len(self._files())

    def forget(self, oldest: int) -> None:
        """Delete the states that no server goes back to: those before the last one that counted in round `oldest`."""
        needed = max((round for round in self if round <= oldest), default=0)
        for round in [round for round in self if round < needed]:
            del self[round]
