"""How worker processes are started. This module does not import torch, so workers can load while this process does.

On Linux, workers are forked from a server process that has imported all they need and has no threads. On other systems
each worker is spawned and does its own imports.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path

from fedadc.system.signals import SIGNALS

# glibc returns large blocks to the system as soon as they are free, so the activations of every step cause page faults:
# a seventh of a CNN's time. A worker repeats the same allocations, so it keeps its memory until it is idle. This does
# not raise its peak.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

SERVER_GONE = 255  # the exit code that multiprocessing reports if the server process is gone
SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # else a process imports files and folders of the current directory


def context() -> BaseContext:
    """The multiprocessing context of this system: forkserver on Linux, else spawn."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    return multiprocessing.get_context("forkserver")


def start_process_server(*modules: str) -> None:
    """Start the server process of the workers; it imports these modules while this process does other work."""
    start = context()
    if start.get_start_method() == "forkserver":
        from multiprocessing import forkserver

        start.set_forkserver_preload(list(modules))
        with environment_set({**KEEP_MEMORY, **SAFE_PATH}), blocked_interrupts(), _no_warning_of_leaks():
            forkserver.ensure_running()


def import_torch() -> None:
    """Import torch with signals blocked: a Ctrl-C during the import would abort the process inside torch."""
    with blocked_interrupts(*SIGNALS):
        importlib.import_module("torch")


@contextmanager
def environment_set(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes started meanwhile, except those that the user has set."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def blocked_interrupts(*signals: signal.Signals) -> Iterator[None]:
    """Delay Ctrl-C (or the given signals) until afterwards; processes started meanwhile never receive them.

    The signals are blocked, which child processes inherit. If they were ignored, this process would lose them.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where child processes inherit no signal mask
        yield
        return
    with _no_warning_of_leaks():
        resource_tracker.ensure_running()  # if it were started meanwhile, it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals or {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _no_warning_of_leaks() -> Iterator[None]:
    """Silence Python's warning that a killed resource tracker may leak: our shared memory has no name to leak."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="resource_tracker: process died unexpectedly")
        yield


def manner_of_death(code: int | None) -> str:
    """How a process ended."""
    if code == SERVER_GONE:
        return "was lost together with the server process that started it"
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The number of cores that this process may use, by its CPU affinity and by the quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(count, round(int(allowed) / int(period))))
    except (OSError, ValueError):  # no container, or "max"
        return count
