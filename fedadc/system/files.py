"""Crash-safe files: written under a temporary name, flushed to the disk, then renamed. Also locks for folders."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fedadc.errors import DiskError, FedadcError, require

log = logging.getLogger("fedadc")
LOCK = ".lock"
PARTIAL = ".part"  # suffix of an incomplete file
FLUSH_THREADS = 16


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: a crash at any time leaves either the old file or the complete new one."""
    write_files([(path, content)])


def write_files(files: Iterable[tuple[Path, bytes]]) -> None:
    """Write several files, each atomically. They are flushed in parallel, which a disk can combine."""
    partials: dict[Path, Path] = {}
    try:
        for path, content in files:
            partials[path] = path.with_name(path.name + PARTIAL)
            partials[path].write_bytes(content)
        if len(partials) == 1:
            flush(*partials.values())
        else:
            with ThreadPoolExecutor(FLUSH_THREADS) as pool:
                list(pool.map(flush, partials.values()))
        for path, partial in partials.items():
            partial.replace(path)
        for folder in {path.parent for path in partials}:
            flush_folder(folder)
    except BaseException:
        for partial in partials.values():
            with suppress(OSError):
                partial.unlink()  # the disk may be full: free the space
        raise


def flush(path: Path) -> None:
    """Flush a file, or the renames and deletions in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
    with suppress(OSError):  # Windows cannot flush a folder
        flush(folder)


def require_new_file(file: Path, what: str, overwrite: bool) -> None:
    """Refuse a file that exists, unless it is to be replaced, or whose folder does not exist."""
    require(file.parent.is_dir(), f"{what}: there is no folder {file.parent}.")
    require(not file.is_dir(), f"{what}: {file} is a folder; a file is needed.")
    require(overwrite or not file.exists(), f"{file} already exists; choose another `{what}`, or use `overwrite`.")


def write_text(path: Path, text: str) -> None:
    write_file(path, text.encode())


def write_new_file(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read. It appears with all its content, and never replaces another."""
    partial = path.with_name(f"{path.name}-{os.getpid()}{PARTIAL}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(content)
        flush(partial)
        os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_regular(path: Path, what: str) -> bytes:
    """The content of a regular file: no symbolic link, no pipe or device, which may never end."""
    flags = [getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")]  # Windows has only the last
    try:
        require(not path.is_symlink(), f"{what}: {path} is a symbolic link, which is not followed.")
        require(stat.S_ISREG(path.lstat().st_mode), f"{what}: {path} is not a regular file.")
        with os.fdopen(os.open(path, os.O_RDONLY | sum(flags)), "rb") as stream:
            require(stat.S_ISREG(os.fstat(stream.fileno()).st_mode), f"{what}: {path} is not a regular file.")
            return stream.read()
    except OSError as error:
        raise FedadcError(f"{what}: {path} cannot be read ({error.strerror or error}).") from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder for writing by this process. The lock ends with the process, even if it is killed."""
    require(folder.is_dir() or not folder.exists(), f"{folder} is not a folder; choose another `out`.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"cannot write to {folder} ({error.strerror or error}).") from error
    try:
        with file_lock(folder / LOCK):
            yield
    except BusyError:
        raise FedadcError(f"another process is writing to {folder}; wait for it or choose another `out`.") from None


class BusyError(Exception):
    """Another process has the lock."""


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Lock a file, which is there only while it is locked. The lock ends with the process, even if it is killed."""
    with ExitStack() as opened:
        path.parent.mkdir(parents=True, exist_ok=True)
        while not _lock(file := opened.enter_context(path.open("w")), path):
            pass  # the previous owner deleted the file after we opened and before we locked it
        try:
            yield
        finally:
            if os.fstat(file.fileno()).st_nlink:  # else the file was deleted, and a new one belongs to another process
                path.unlink(missing_ok=True)


def _lock(file: IO[str], path: Path) -> bool:
    """Lock a file; return False if it has been deleted meanwhile."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError from None
    except (ImportError, OSError) as error:  # the operating system or the file system has no locks
        log.warning("%s cannot be locked (%s); make sure that no other process writes beside it", path, error)
        return True
    return bool(os.fstat(file.fileno()).st_nlink)


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def to_safetensors(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The content of a safetensors file with these tensors."""
    from safetensors.torch import save

    copies = {name: v.detach().cpu().clone(memory_format=torch.contiguous_format) for name, v in tensors.items()}
    try:
        content: bytes = save(copies, metadata=metadata)
    except KeyError as error:  # how safetensors reports a data type that it does not support
        raise FedadcError(f"a state of type {error} cannot be saved; use real numbers.") from None
    return content
