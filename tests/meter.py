"""Reads files, each in a process of its own, and says what came of it and what it took; started by test_hostile.

A line on the standard input names a reader and a file, a line of the standard output is its answer.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fedadc.data.loaders import download as files
from fedadc.data.loaders.builtin import read_cifar, read_idx
from fedadc.data.loaders.csv import csv_table
from fedadc.data.loaders.images import image_folder
from fedadc.data.loaders.npz import npz
from fedadc.errors import FedadcError
from fedadc.models.build import read_weights
from fedadc.runs.record import load_config


def unpack(path: Path) -> object:
    sums = {"x.bin": "0" * 32}
    files.SOURCES["small"] = files.Source("small", (), sums, "", (path.name, files.md5_of(path)))
    return files.download("small", path.parent / "data", origin=str(path))


READERS: dict[str, Callable[[Path], object]] = {
    "npz": npz,
    "idx": read_idx,
    "cifar": partial(read_cifar, label_bytes=1, classes=10),
    "csv": partial(csv_table, label="label"),
    "clients": partial(csv_table, label="label", client="who"),
    "folder": image_folder,
    "scaled folder": partial(image_folder, size=20_000),
    "weights": read_weights,
    "config": load_config,
    "archive": unpack,
    "greedy": lambda path: b"\1" * (300 << 20),  # takes far more than its file, so that tests of tests see it
}


def allowed(path: Path) -> int:
    """Bytes that reading a file may take: its own order of size."""
    inside = path.rglob("*") if path.is_dir() else [path]
    return (64 << 20) + 20 * sum(p.stat().st_size for p in inside if p.is_file())


def own_memory() -> int:
    """The peak, in bytes, without pages of files: how much of a library is mapped at a time is the system's choice."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    kilobytes = {
        line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith(("VmHWM", "RssFile"))
    }
    return (int(kilobytes["VmHWM"]) - int(kilobytes["RssFile"])) << 10


def answer(reader: str, path: Path) -> dict[str, object]:
    """Within a fork: its peak starts at what the process has."""
    signal.alarm(20)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    room = pages * resource.getpagesize() + allowed(path) + (256 << 20)  # also what is only asked for, not used
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    before = own_memory()
    try:
        said = f"read: {READERS[reader](path)!r:.80}"
    except FedadcError as error:
        said = f"refused: {error}"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    return {"said": said, "grown": own_memory() - before}


def forked(reader: str, path: Path) -> dict[str, object]:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(theirs, json.dumps(answer(reader, path)).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(found) if found else {"said": f"ended by signal {status & 0x7F}", "grown": 0}


if __name__ == "__main__":
    for line in sys.stdin:
        reader, path = json.loads(line)
        print(json.dumps({**forked(reader, Path(path)), "allowed": allowed(Path(path))}), flush=True)
