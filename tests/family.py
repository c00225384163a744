"""The descendants of a process, from /proc of Linux."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedadc.objectives import OBJECTIVES

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")

# what clients minimize where labels are classes
OBJECTIVES_OF_CLASSES = {name: cls for name, cls in OBJECTIVES.items() if cls.task == "classification"}


def children(pid: int) -> set[int]:
    try:
        return {int(c) for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()}
    except OSError:  # gone in the meantime
        return set()


def descendants(pid: int) -> set[int]:
    return {found for child in children(pid) for found in {child} | descendants(child)}


def workers_alive() -> set[int]:
    """Workers of this process: children of the server that forks them."""
    return alive(descendants(os.getpid()) - children(os.getpid()))


def alive(pids: set[int]) -> set[int]:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return "gone"

    return {pid for pid in pids if state(pid) not in ("gone", "Z")}


def eventually(condition: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
