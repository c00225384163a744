"""Load data from an .npz file. Sizes are checked before memory is allocated, and pickled objects are refused."""

from __future__ import annotations

import math
import reprlib
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from fedadc.data.dataset import Array, Dataset, Samples
from fedadc.data.loaders.arguments import file_or_share, path_of
from fedadc.data.loaders.arrays import Pair, checked_owners, from_arrays, samples_like
from fedadc.data.loaders.limits import require_proportionate
from fedadc.data.split import HeldOut
from fedadc.errors import DataError, FedadcError, kind_of_failure, one_line, require, require_file

MAX_ARRAYS = 1000  # a data set needs fewer than ten
MAX_HEADER = 4096  # characters; the header of a plain array has about a hundred


def npz(
    path: Path,
    test: Path | None = None,
    task: str | None = None,
    missing: list[str] | None = None,
    merge_names: bool = False,
) -> Dataset:
    """your own arrays: x and y; optionally x_test, y_test, client and client_test"""
    arrays = read_npz(path)
    test_pair, test_owners = None, arrays.get("client_test")
    if test is not None:
        test_arrays = read_npz(test)
        test_pair = pair_in(test_arrays, test, ("", "_test"))
        test_owners = test_arrays.get("client" if "x" in test_arrays else "client_test")
    elif {"x_test", "y_test"} & arrays.keys():
        test_pair = pair_in(arrays, path, ("_test",))
    train, owners = pair_in(arrays, path, ("", "_train")), arrays.get("client")
    return from_arrays(
        *train, test_pair, owners=owners, test_owners=test_owners, name=path.name, task=task, missing=missing,
        merge_names=merge_names,
    )  # fmt: skip


def from_npz(
    path: str | Path,
    test: str | Path | float | None = None,
    *,
    validation: float | None = None,
    seed: int = 0,
    task: str | None = None,
) -> Dataset:
    """A data set from an .npz file with x and y; optionally x_test, y_test, client and client_test.

    `test` is another such file or a share to hold out, and `validation` is a share of the rest; `seed` draws them.
    """
    file, share = file_or_share(test)
    return HeldOut(share, validation, seed)(npz(path_of(path), file, task))


def npz_like(path: Path, like: Dataset) -> Dataset:
    """A data set from an .npz file, with the classes, normalization and input dtype of an existing data set."""
    arrays = read_npz(path)

    def samples(*endings: str) -> Samples:
        found = samples_like(like.classes, *pair_in(arrays, path, endings), path.name, like.targets)
        dtype = like.train.x.dtype
        both_floating = found.x.is_floating_point() and dtype.is_floating_point
        return Samples(found.x.to(dtype), found.y) if both_floating else found

    train = samples("", "_train")
    test = samples("_test") if {"x_test", "y_test"} & arrays.keys() else None
    owners, test_owners = (
        None if ids is None else checked_owners(ids, 0 if part is None else len(part), path.name)
        for ids, part in ((arrays.get("client"), train), (arrays.get("client_test"), test))
    )
    return Dataset(
        path.name,
        train,
        like.classes,
        test,
        None,
        like.normalization,
        owners=owners,
        test_owners=test_owners,
        targets=like.targets,
    )


def pair_in(arrays: dict[str, Array], path: Path, endings: tuple[str, ...]) -> Pair:
    """The first pair of arrays x and y whose names have one of these endings."""
    for ending in endings:
        if f"x{ending}" in arrays and f"y{ending}" in arrays:
            return arrays[f"x{ending}"], arrays[f"y{ending}"]
    wanted = " or ".join(f"x{e} and y{e}" for e in endings)
    raise DataError(f"{path} needs arrays {wanted}; it has {', '.join(list(arrays)[:10]) or 'none'}.")


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays of an .npz file, by name."""
    require_file(path, "data")
    try:
        with path.open("rb") as stream:
            single = stream.read(6) == b"\x93NUMPY"
        require(not single, f"{path} is a single array; an .npz file with x and y is needed.", DataError)
        with zipfile.ZipFile(path) as archive:
            members = _members(path, archive)
            return {name: _read(path, archive, name, member) for name, member in members.items()}
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise kind_of_failure(error)(f"{path} is damaged or not an .npz file ({one_line(error)}).") from error


def _members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    listed = archive.infolist()
    require(
        len(listed) <= MAX_ARRAYS, f"{path} contains {len(listed)} arrays; at most {MAX_ARRAYS} are allowed.", DataError
    )
    require_proportionate(
        sum(member.file_size for member in listed),
        path.stat().st_size,
        str(path),
        "if its arrays really are that uniform, save them uncompressed with np.savez",
    )
    members: dict[str, zipfile.ZipInfo] = {}
    for member in listed:
        name = member.filename.removesuffix(".npy")
        require(name not in members, f"{path} contains the array {reprlib.repr(name)} twice.", DataError)
        require(  # only these two methods can be decompressed with a size limit
            member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED),
            f"{path}: array {reprlib.repr(name)} is compressed by a method that NumPy does not use; "
            "save it with np.savez.",
            DataError,
        )
        members[name] = member
    return members


def _read(path: Path, archive: zipfile.ZipFile, name: str, member: zipfile.ZipInfo) -> Array:
    where = f"{path}: array {reprlib.repr(name)}"
    with archive.open(member) as stream:
        shape, dtype = _header(stream, where)
        start = stream.tell()
    require(not dtype.hasobject, f"{where}: pickled objects are refused; save plain numbers or strings.", DataError)
    require(
        dtype.kind != "V" and dtype.itemsize > 0,
        f"{where} has the type {reprlib.repr(str(dtype))}; only plain numbers and strings are supported.",
        DataError,
    )
    size = math.prod(shape) * dtype.itemsize
    require(
        min(shape, default=0) >= 0 and start + size == member.file_size,
        f"{where} is {reprlib.repr(list(shape))} {dtype} in its header, but has {member.file_size - start} bytes.",
        DataError,
    )
    with archive.open(member) as stream:
        array: Array = np.lib.format.read_array(stream, allow_pickle=False)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of an array. Version 3.0 is only needed for structured types, which are not supported."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        version = np.lib.format.read_magic(stream)
        require(
            version in readers,
            f"{where} has .npy version {version[0]}.{version[1]}; only 1.0 and 2.0 are supported.",
            DataError,
        )
        shape, _, dtype = readers[version](stream, max_header_size=MAX_HEADER)
    except FedadcError:
        raise
    except (zipfile.BadZipFile, zlib.error):
        raise
    except Exception as error:  # NumPy evaluates the header as a Python literal, which may raise any exception
        raise DataError(f"{where} has no valid header ({one_line(error)[:80]}).") from error
    return shape, dtype
