"""Files that survive a crash: written under another name, flushed to the disk, then renamed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

PARTIAL = ".part"  # how the name of an unfinished file ends
FLUSHES = 16  # at a time


def write_durably(path: Path, content: bytes) -> None:
    """After it returns the file is there, whole, whatever happens; before, it is as it was."""
    write_all_durably([(path, content)])


def write_all_durably(files: Iterable[tuple[Path, bytes]]) -> None:
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


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Named tensors as a safetensors file."""
    from safetensors.torch import save

    own = {name: v.detach().cpu().clone(memory_format=torch.contiguous_format) for name, v in tensors.items()}
    content: bytes = save(own)
    return content
