"""Data from an .npz file. Every size is checked before memory is allocated, and nothing in it is ever executed."""

from __future__ import annotations

import math
import reprlib
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from fedadc.data.dataset import Array, Dataset, Samples
from fedadc.data.loaders.arrays import Pair, checked_owners, from_arrays, samples_like
from fedadc.data.loaders.limits import require_proportionate
from fedadc.errors import FedadcError, one_line, require, require_file

MOST_MEMBERS = 1000  # a data set has seven
LONGEST_HEADER = 4096  # characters; the header of a plain array has about a hundred


def npz(path: Path, test: Path | None = None) -> Dataset:
    """your own arrays: x, y, and where you have them x_test, y_test, client, client_test"""
    arrays = read_npz(path)
    held, held_by = None, arrays.get("client_test")
    if test is not None:
        more = read_npz(test)
        held, held_by = pair_in(more, test, ("", "_test")), more.get("client" if "x" in more else "client_test")
    elif {"x_test", "y_test"} & arrays.keys():
        held = pair_in(arrays, path, ("_test",))
    train, owners = pair_in(arrays, path, ("", "_train")), arrays.get("client")
    return from_arrays(*train, held, owners=owners, test_owners=held_by, name=path.name)


def npz_like(path: Path, like: Dataset) -> Dataset:
    """An .npz with the classes and the kind of numbers of a data set that is known."""
    arrays = read_npz(path)

    def samples(*endings: str) -> Samples:
        found = samples_like(like.classes, *pair_in(arrays, path, endings), path.name)
        number = like.train.x.dtype
        both = found.x.is_floating_point() and number.is_floating_point
        return Samples(found.x.to(number), found.y) if both else found

    train = samples("", "_train")
    test = samples("_test") if {"x_test", "y_test"} & arrays.keys() else None
    owners, test_owners = (
        None if ids is None else checked_owners(ids, 0 if part is None else len(part), path.name)
        for ids, part in ((arrays.get("client"), train), (arrays.get("client_test"), test))
    )
    return Dataset(
        path.name, train, like.classes, test, None, like.normalization, owners=owners, test_owners=test_owners
    )


def pair_in(arrays: dict[str, Array], path: Path, endings: tuple[str, ...]) -> Pair:
    for ending in endings:
        if f"x{ending}" in arrays and f"y{ending}" in arrays:
            return arrays[f"x{ending}"], arrays[f"y{ending}"]
    wanted = " or ".join(f"x{e} and y{e}" for e in endings)
    raise FedadcError(f"{path} needs arrays {wanted}; it has {', '.join(list(arrays)[:10]) or 'none'}.")


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
    require_proportionate(
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
            f"{path}: array {reprlib.repr(name)} is compressed in a way that NumPy does not use; "
            "save it with np.savez.",
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
