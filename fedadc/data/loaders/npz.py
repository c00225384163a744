"""The arrays of an .npz file: every size in it is checked before room is made, and nothing in it is ever run."""

from __future__ import annotations

import math
import reprlib
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from fedadc.data.dataset import Array
from fedadc.data.loaders.limits import require_fair
from fedadc.errors import FedadcError, one_line, require, require_file

MOST_MEMBERS = 1000  # a data set has seven
LONGEST_HEADER = 4096  # characters; the header of a plain array has about a hundred


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays by name."""
    require_file(path, "data")
    try:
        with path.open("rb") as stream:
            single = stream.read(6) == b"\x93NUMPY"
        require(not single, f"{path} is a single array; an .npz with x and y is needed.")
        with zipfile.ZipFile(path) as archive:
            members = _members(path, archive)
            return {name: _read(path, archive, name, member) for name, member in members.items()}
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise FedadcError(f"{path} is not a whole .npz file ({one_line(error)}).") from error


def _members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    found = archive.infolist()
    require(
        len(found) <= MOST_MEMBERS, f"{path} holds {len(found)} arrays; a data set has no more than {MOST_MEMBERS}."
    )
    require_fair(
        sum(member.file_size for member in found),
        path.stat().st_size,
        str(path),
        "if its arrays are meant to be so uniform, write them with np.savez, uncompressed",
    )
    members: dict[str, zipfile.ZipInfo] = {}
    for member in found:
        name = member.filename.removesuffix(".npy")
        require(name not in members, f"{path} holds the array {reprlib.repr(name)} twice.")
        require(
            member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED),  # others unpack without a limit
            f"{path}: array {reprlib.repr(name)} is packed in a way that NumPy does not use; write it with np.savez.",
        )
        members[name] = member
    return members


def _read(path: Path, archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo) -> Array:
    where = f"{path}: array {reprlib.repr(name)}"
    with archive.open(member) as stream:
        shape, dtype = _header(stream, where)
        start = stream.tell()
    require(not dtype.hasobject, f"{where}: pickled objects are refused; save plain numbers or strings.")
    require(
        dtype.kind != "V" and dtype.itemsize > 0,
        f"{where} has the type {reprlib.repr(str(dtype))}; plain numbers or strings are read.",
    )
    size = math.prod(shape) * dtype.itemsize
    require(
        min(shape, default=0) >= 0 and start + size == member.file_size,
        f"{where} is {reprlib.repr(list(shape))} {dtype} by its header, but has {member.file_size - start} bytes.",
    )
    with archive.open(member) as stream:
        array: Array = np.lib.format.read_array(stream, allow_pickle=False)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type. Version 3 is for structured types only, which are not read."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        version = np.lib.format.read_magic(stream)
        require(version in readers, f"{where} has the .npy version {version[0]}.{version[1]}; 1.0 and 2.0 are read.")
        shape, _, dtype = readers[version](stream, max_header_size=LONGEST_HEADER)
    except FedadcError:
        raise
    except (zipfile.BadZipFile, zlib.error):
        raise
    except Exception as error:  # NumPy has Python parse the header, and passes on whatever that raises
        raise FedadcError(f"{where} has no valid header ({one_line(error)[:80]}).") from error
    return shape, dtype
