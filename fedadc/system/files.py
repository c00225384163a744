"""Files that survive a crash: written under another name, flushed to the disk, then renamed. One writer at a time."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fedadc.errors import FedadcError

log = logging.getLogger("fedadc")
LOCK = ".lock"
PARTIAL = ".part"  # how the name of an unfinished file ends
FLUSHES = 16  # at a time


def write_file(path: Path, content: bytes) -> None:
    """After it returns the file is there, whole, whatever happens; before, it is as it was."""
    write_files([(path, content)])


def write_files(files: Iterable[tuple[Path, bytes]]) -> None:
    """The same of many: they are flushed side by side, which a disk does in a few goes."""
    partials: dict[Path, Path] = {}
    try:
        for path, content in files:
            partials[path] = path.with_name(path.name + PARTIAL)
            partials[path].write_bytes(content)
        if len(partials) == 1:
            flush(*partials.values())
        else:
            with ThreadPoolExecutor(FLUSHES) as pool:
                list(pool.map(flush, partials.values()))
        for path, partial in partials.items():
            partial.replace(path)
        for folder in {path.parent for path in partials}:
            flush_folder(folder)
    except BaseException:
        for partial in partials.values():
            with suppress(OSError):
                partial.unlink()  # a full disk has use for the room
        raise


def flush(path: Path) -> None:
    """A file, or the renames and deletions in a folder, reach the disk."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
    with suppress(OSError):  # Windows has no such thing
        flush(folder)


def write_text(path: Path, text: str) -> None:
    write_file(path, text.encode())


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Nobody else writes to a folder meanwhile. The lock goes with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with ExitStack() as held:
        while not _is_ours(file := held.enter_context(path.open("w")), folder):
            pass  # its last holder took it away between our opening and locking it
        try:
            yield
        finally:
            if os.fstat(file.fileno()).st_nlink:  # else somebody has removed it, and what is there now is not ours
                path.unlink(missing_ok=True)


def _is_ours(file: IO[str], folder: Path) -> bool:
    """Lock a file; whether it still stands under its name."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FedadcError(f"another process is writing to {folder}; wait for it or choose another --out.") from None
    except (ImportError, OSError) as error:  # a system, or a file system, without it
        log.warning("%s cannot be locked (%s): see to it that no other process writes to it", folder, error)
        return True
    return bool(os.fstat(file.fileno()).st_nlink)


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def to_safetensors(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Named tensors as a safetensors file."""
    from safetensors.torch import save

    own = {name: v.detach().cpu().clone(memory_format=torch.contiguous_format) for name, v in tensors.items()}
    try:
        content: bytes = save(own, metadata=metadata)
    except KeyError as error:  # safetensors' way to say so
        raise FedadcError(f"a state of type {error} cannot be saved; use real numbers.") from None
    return content
