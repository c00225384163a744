"""Where worker processes come from. Nothing here imports torch, so that they can get ready while this process does.

On Linux they are forked from a server process that has imported what they need and has no threads; elsewhere each is
spawned and imports for itself.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path

from fedadc.system.signals import SIGNALS

# glibc gives large blocks back to the system as soon as they are free, so every step's activations begin with page
# faults: a seventh of a CNN's time. A worker does the same over and over, so it keeps what it has once had until it is
# idle. Its peak is no higher for that.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # else the server would import a folder `fedadc` from where the command runs


def context() -> BaseContext:
    """How processes are started here."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    return multiprocessing.get_context("forkserver")


def start_process_server(*modules: str) -> None:
    """Start the server of worker processes; it imports these modules while this process does other work."""
    start = context()
    if start.get_start_method() == "forkserver":
        from multiprocessing import forkserver

        start.set_forkserver_preload(list(modules))
        with keeping_memory({**KEEP_MEMORY, **SAFE_PATH}), blocked_interrupts():
            forkserver.ensure_running()


def import_torch() -> None:
    """A Ctrl-C in the middle of it would end the process by an abort in torch's own code."""
    with blocked_interrupts(*SIGNALS):
        importlib.import_module("torch")


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
def blocked_interrupts(*signals: signal.Signals) -> Iterator[None]:
    """A Ctrl-C (or these signals) takes effect afterwards; processes that are started meanwhile never hear of one.

    It is blocked, which they inherit; if it were ignored, it would be lost to the parent, whose it is to handle.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where children inherit nothing of the kind
        yield
        return
    resource_tracker.ensure_running()  # else whoever needs it meanwhile starts it, and unblocks the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals or {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """That this process may use: by its affinity, and by the quota of its container."""
    many = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(many, round(int(allowed) / int(period))))
    except (OSError, ValueError):  # no container, or "max"
        return many
