"""The process that trains one run of a queue, and its messages to the queue."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedadc.cluster.settings import RayCluster
from fedadc.errors import BUG, explained, one_line
from fedadc.runs.record import load_config
from fedadc.runs.runner import run

PATIENCE = 10.0  # seconds that a process has to save its run and end
INTERVAL = 0.2  # seconds between two messages of a process, and between two reports to `watch`


@dataclass(frozen=True)
class RunRequest:
    """What a process is told to train."""

    tree: dict[str, Any]
    folder: Path
    out: Path
    until: int | None
    data_dir: Path | None
    device: str
    workers: int = 0  # processes on this machine that train the clients
    cluster: RayCluster | None = None  # that trains the clients


@dataclass(frozen=True)
class RunFailure:
    """The last message of a process whose run failed."""

    text: str
    exit_code: int
    trace: str = ""


@dataclass(frozen=True)
class RunDone:
    """The last message of a process whose run is done."""

    record: dict[str, Any]  # of the last round


STARTED = "started"


def train_run(pipe: Connection, request: RunRequest) -> None:
    """The whole life of a process: it trains one run, and ends early if its parent ends or asks it to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _end_with_parent()
    _send(pipe, STARTED)
    try:
        config = load_config(request.tree, folder=request.folder)
        result = run(
            config, out=request.out, resume=True, until=request.until, data_dir=request.data_dir, device=request.device,
            workers=request.workers if request.workers > 1 else 0, engine=request.cluster, watch=_Reporter(pipe),
            notes=lambda _: None,
        )  # fmt: skip
        _send(pipe, RunDone(_figures(result.history[-1])))
    except KeyboardInterrupt:  # a signal; the run is saved
        pass
    except Exception as error:  # a bug in a user's own method must not stop the other runs
        known = explained(error)
        if known is None:
            _send(pipe, RunFailure(f"{type(error).__name__}: {one_line(error)}", BUG, traceback.format_exc()))
        else:
            _send(pipe, RunFailure(str(known), known.exit_code))


class _Reporter:
    """Sends the records of rounds to the parent, not too often."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._sent = pipe, 0.0

    def __call__(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._sent >= INTERVAL:
            self._sent = now
            _send(self._pipe, _figures(record))


def _figures(record: dict[str, Any]) -> dict[str, Any]:
    """A record without its long parts."""
    return {key: value for key, value in record.items() if not isinstance(value, list | dict)}


def _send(pipe: Connection, message: Any) -> None:
    with suppress(OSError):  # the parent is gone
        pipe.send(message)


def _end_with_parent() -> None:
    """End this process when its parent ends, however that happens: first as by SIGTERM, so that the run is saved."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
