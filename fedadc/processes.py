"""Where worker processes come from. Nothing here imports torch, so that they can get ready while this process does.

On Linux they are forked from a server process that has imported what they need and has no threads; elsewhere each is
spawned and imports for itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path

PRELOADED = ["fedadc.cli", "fedadc.engines.worker"]

# glibc gives large blocks back to the system as soon as they are free, so every step's activations begin with page
# faults: a seventh of a CNN's time. A worker does the same over and over, so it keeps what it has once had until it is
# idle. Its peak is no higher for that.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def context() -> BaseContext:
    """How processes are started here."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(PRELOADED)
    return forked


def get_ready() -> None:
    """Let the server of worker processes start; it imports torch while this process does the same."""
    if context().get_start_method() == "forkserver":
        from multiprocessing import forkserver

        with keeping_memory(), children_ignore_interrupts():
            forkserver.ensure_running()


@contextmanager
def keeping_memory(settings: Mapping[str, str] = KEEP_MEMORY) -> Iterator[None]:
    """Processes that are started meanwhile keep their memory, unless the user's environment says otherwise."""
    fresh = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(fresh)
    try:
        yield
    finally:
        for name in fresh:
            del os.environ[name]


@contextmanager
def children_ignore_interrupts() -> Iterator[None]:
    """A process inherits what is ignored when it is started: Ctrl-C is then the parent's alone to handle."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """That this process may use: by its affinity, and by the quota of its container."""
    many = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(many, round(int(allowed) / int(period))))
    except (OSError, ValueError):  # no container, or "max"
        return many
