"""Files of a site whose names have the beginning of their checksums, so that damage is noticed at reading."""

from __future__ import annotations

import re
from pathlib import Path

from fedadc.errors import RunDamaged, require
from fedadc.system.files import checksum, write_file

FILE = re.compile(r"(.+)-([0-9a-f]{16})\.safetensors")
CHECKED = 16  # characters of a checksum


def checked_files(folder: Path) -> dict[str, Path]:
    """The files in a folder by their names without checksums."""
    found = folder.glob("*.safetensors") if folder.is_dir() else ()
    return {match[1]: path for path in found if (match := FILE.fullmatch(path.name))}


def read_checked(path: Path) -> bytes:
    content = path.read_bytes()
    match = FILE.fullmatch(path.name)
    intact = match is not None and checksum(content)[:CHECKED] == match[2]
    require(intact, f"{path} is damaged.", RunDamaged)
    return content


def write_checked(folder: Path, name: str, content: bytes) -> None:
    """Write a file, in place of an older one with this name."""
    path = folder / f"{name}-{checksum(content)[:CHECKED]}.safetensors"
    old = checked_files(folder).get(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(path, content)
    if old is not None and old != path:
        old.unlink()
