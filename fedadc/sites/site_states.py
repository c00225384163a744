"""The states of a client on its site's disk, one file for every round that may still be gone back to."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path

from safetensors.torch import load

from fedadc.models.vectors import State, canonical
from fedadc.sites.checked_files import checked_files, read_checked, write_checked
from fedadc.system.files import to_safetensors

NAME_OF_ROUND = "round-"


class SiteStates(MutableMapping[int, State]):
    """States by round, as `Client` keeps them. A state is on the disk before the upload of its round is sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _files(self) -> dict[int, Path]:
        files = checked_files(self.folder)
        return {
            int(name.removeprefix(NAME_OF_ROUND)): path
            for name, path in files.items()
            if name.startswith(NAME_OF_ROUND)
        }

    def __getitem__(self, round: int) -> State:
        return canonical(load(read_checked(self._files()[round])))

    def __contains__(self, round: object) -> bool:
        return round in self._files()

    def __setitem__(self, round: int, state: State) -> None:
        write_checked(self.folder, f"{NAME_OF_ROUND}{round:08d}", to_safetensors(state))

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
