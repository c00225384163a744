"""Find the files of the built-in data sets on this machine, or download and verify them."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedadc.errors import DataError, DiskError, FedadcError, kind_of_failure, require, unknown
from fedadc.system.files import PARTIAL

Progress = Callable[[str, int, int], None]  # file name, bytes so far, bytes in total (0: unknown)
BLOCK = 1 << 20  # bytes read at once
MAX_FILE = 256 << 20  # bytes; the largest official file, CIFAR-10's archive, has 170 MB


@dataclass(frozen=True)
class Source:
    """The official files of a data set."""

    folder: str  # subfolder of the data folder
    also: tuple[str, ...]  # other common names of the subfolder
    files: dict[str, str]  # file name -> md5
    address: str  # URL of the folder to download from
    archive: tuple[str, str] | None = None  # (file name, md5) of a tar file that contains the files


def _idx(folder: str, also: tuple[str, ...], address: str, *md5: str) -> Source:
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return Source(folder, also, dict(zip(names, md5, strict=True)), address)


SOURCES: dict[str, Source] = {
    "mnist": _idx(
        "mnist", ("MNIST/raw", "MNIST"), "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion_mnist": _idx(
        "fashion-mnist", ("FashionMNIST/raw", "fashion_mnist"),
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "cifar10": Source(
        "cifar-10-batches-bin", (),
        {
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
        "https://www.cs.toronto.edu/~kriz/",
        ("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    ),
    "cifar100": Source(
        "cifar-100-binary", (),
        {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15", "test.bin": "4499cfba6c016c1be1438163640a0898"},
        "https://www.cs.toronto.edu/~kriz/",
        ("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
    ),
}  # fmt: skip


def data_folders(data_dir: str | Path | None) -> list[Path]:
    """The folders that are searched for data: --data-dir, FEDADC_DATA and the cache folder, in this order."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedadc"
    given = [data_dir, os.environ.get("FEDADC_DATA")]
    return [*(Path(g).expanduser() for g in given if g), cache]


def find(name: str, data_dir: str | Path | None) -> Path:
    """The folder that contains a data set. The error for absent data says which files to put where."""
    source = SOURCES[name]
    roots = data_folders(data_dir)
    for root in roots:
        for folder in (source.folder, *source.also, "."):
            if all(locate(root / folder, file) for file in source.files):
                return root / folder
    expected = roots[0] / source.folder
    raise DataError(
        f"data {name} is not on this machine: put {', '.join(source.files)} into {expected}, or run "
        f"`fedadc data get {name}` with a network connection (searched {', '.join(map(str, roots))})."
    )


def locate(folder: Path, file: str) -> Path | None:
    """The path of a file or of its decompressed form; None if neither exists."""
    for path in (folder / file, folder / file.removesuffix(".gz")):
        if path.is_file():
            return path
    return None


def md5_of(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def check_md5(path: Path, md5: str) -> None:
    size = path.stat().st_size
    too_large = f"{path} is not the official file: it has {size} bytes, more than any official file."
    require(size <= MAX_FILE, too_large, DataError)
    found, final_path = md5_of(path), path.with_name(path.name.removesuffix(PARTIAL))
    wrong = f"{final_path} is damaged or not the official file: its md5 is {found}, not {md5}."
    require(found == md5, wrong, DataError)


def download(
    name: str, data_dir: str | Path | None = None, origin: str | None = None, progress: Progress | None = None
) -> Path:
    """Download, verify and unpack a data set; returns its folder.

    `origin` is another URL, or a local folder or archive. `progress` is called with the file, the bytes so far and the
    bytes in total.
    """
    require(name != "digits", "data digits needs no download; it is part of the package.")
    if name not in SOURCES:
        raise unknown("data set to download", name, SOURCES)
    source = SOURCES[name]
    target = data_folders(data_dir)[0] / source.folder
    new_folders = [folder for folder in (target, target.parent) if not folder.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"cannot write to {target} ({error.strerror or error}).") from error
    try:
        if source.archive:
            file, md5 = source.archive
            _take_unpacked(origin, source, target)
            if not all(_is_good(target / name, expected) for name, expected in source.files.items()):
                with tempfile.TemporaryDirectory(dir=target) as temporary:
                    archive = _fetch(_address(origin or source.address, file), Path(temporary) / file, md5, progress)
                    _unpack(archive, source.files, Path(temporary), target)
        else:
            for file, md5 in source.files.items():
                if not _is_good(target / file, md5):
                    _fetch(_address(origin or source.address, file), target / file, md5, progress)
    except (OSError, EOFError, tarfile.TarError, zlib.error, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise kind_of_failure(reason)(
            f"data {name} could not be downloaded ({reason}): put {', '.join(source.files)} into {target} yourself, or "
            f"pass as `origin` a folder, an archive or another URL that has {(source.archive or ('them',))[0]}."
        ) from error
    finally:
        for folder in new_folders:
            with contextlib.suppress(OSError):
                folder.rmdir()  # succeeds only if the folder is still empty
    return target


def _take_unpacked(origin: str | None, source: Source, target: Path) -> None:
    """Copy the files from the folder `origin`, if it contains them already unpacked."""
    for folder in (Path(origin).expanduser(), Path(origin).expanduser() / source.folder) if origin else ():
        if folder.is_dir() and all((folder / file).is_file() for file in source.files):
            for file, md5 in source.files.items():
                _fetch((folder / file).resolve().as_uri(), target / file, md5, None)
            return


def _address(origin: str, file: str) -> str:
    """The URL of a file in `origin`, which is a local file or folder, or a URL."""
    path = Path(origin).expanduser()
    if path.is_file():
        return path.resolve().as_uri()
    if path.is_dir():
        return (path / file).resolve().as_uri()
    return origin if origin.endswith(file) else f"{origin.rstrip('/')}/{file}"


def _fetch(address: str, target: Path, md5: str, progress: Progress | None) -> Path:
    """Download and verify under a temporary name, so that `target` never holds an incomplete file."""
    partial = target.with_name(target.name + PARTIAL)
    try:
        with urllib.request.urlopen(address, timeout=30) as answer, partial.open("wb") as out:
            _copy(answer, out, int(answer.headers.get("Content-Length") or 0), target.name, progress)
        check_md5(partial, md5)
        partial.replace(target)
    except ValueError as error:  # raised by urllib for an invalid URL
        raise FedadcError(f"`origin`: {address!r} is neither a file, a folder nor a URL ({error}).") from error
    finally:
        partial.unlink(missing_ok=True)
    return target


def _copy(source: IO[bytes] | Any, out: IO[bytes], size: int, what: str, progress: Progress | None) -> None:
    done = 0
    while block := source.read(BLOCK):
        done += len(block)
        require(
            done <= MAX_FILE,
            f"{what} is too large: it has more than {MAX_FILE} bytes, the limit for official files.",
            DataError,
        )
        out.write(block)
        if progress:
            progress(what, done, size)


def _unpack(archive: Path, files: dict[str, str], temporary: Path, target: Path) -> None:
    """Extract only the expected files of a tar file. The paths inside the archive never decide where files go."""
    missing = dict(files)
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            too_large = f"{archive.name}: {member.name} is too large, {member.size} bytes."
            require(member.size <= MAX_FILE, too_large, DataError)
            file = Path(member.name).name
            if file in missing and member.isfile() and (content := tar.extractfile(member)) is not None:
                with (temporary / file).open("wb") as out:
                    _copy(content, out, member.size, file, None)
                check_md5(temporary / file, missing.pop(file))
    require(not missing, f"{archive.name} lacks {', '.join(missing)}.", DataError)
    for file in files:
        (temporary / file).replace(target / file)


def _is_good(path: Path, md5: str) -> bool:
    return path.is_file() and path.stat().st_size <= MAX_FILE and md5_of(path) == md5
