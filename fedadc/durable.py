"""Files that survive a crash: written under another name, flushed to the disk, then renamed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

PARTIAL = ".part"  # how the name of an unfinished file ends


def write_durably(path: Path, content: bytes) -> None:
    """After it returns the file is there, whole, whatever happens; before, it is as it was."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()  # a full disk has use for the room
        raise


def flush_folder(folder: Path) -> None:
    """Renames and deletions in a folder reach the disk too, where the system can be asked for it."""
    with suppress(OSError):  # Windows has no such thing
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Named tensors as a safetensors file."""
    from safetensors.torch import save

    own = {name: v.detach().cpu().clone(memory_format=torch.contiguous_format) for name, v in tensors.items()}
    content: bytes = save(own)
    return content
