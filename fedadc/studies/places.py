"""Where the runs of a queue are trained: in processes on this machine; `cluster_places.py` has those on a cluster."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from fedadc.studies.run_process import RunRequest, train_run
from fedadc.system.processes import context, cores, manner_of_death, start_process_server

IMPORTED_BY_SERVER = "fedadc.studies.run_process"


class RunProcess(Protocol):
    """A process that trains a run. Its messages come through the pipe, which is closed when it has ended."""

    pipe: Connection

    @property
    def exitcode(self) -> int | None: ...

    @property
    def manner_of_death(self) -> str: ...

    def signal(self, number: int) -> None: ...

    def join(self, seconds: float) -> None: ...


class Places(Protocol):
    """Room for so many runs at once."""

    device: str

    @property
    def room(self) -> int: ...

    def start(self, request: RunRequest, at_once: int, is_long: bool) -> RunProcess:
        """Start to train a run, of which so many are trained at once. The clients of a long one may share cores."""
        ...

    def release(self, process: RunProcess) -> None:
        """A process has ended."""
        ...

    def close(self) -> None: ...


class LocalProcess:
    """A process on this machine."""

    def __init__(self, request: RunRequest) -> None:
        start_process_server(IMPORTED_BY_SERVER)  # it may have been killed
        self.device = request.device
        self.pipe, theirs = context().Pipe()
        self._process = context().Process(target=train_run, args=(theirs, request))  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()

    @property
    def exitcode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    @property
    def manner_of_death(self) -> str:
        return manner_of_death(self.exitcode)

    def signal(self, number: int) -> None:
        with suppress(OSError):  # it has ended
            os.kill(self._process.pid or 0, number)

    def join(self, seconds: float) -> None:
        self._process.join(seconds)


class ThisMachine:
    """One run per core, or one per GPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if device == "cuda" else [device]
        self.room = cores() if device == "cpu" else max(1, len(self._gpus))
        self._running: list[RunProcess] = []
        start_process_server(IMPORTED_BY_SERVER)

    def start(self, request: RunRequest, at_once: int, is_long: bool) -> RunProcess:
        busy = [process.device for process in self._running if isinstance(process, LocalProcess)]
        device = min(self._gpus, key=busy.count)
        workers = cores() // at_once if self.device == "cpu" and is_long else 0
        process = LocalProcess(replace(request, device=device, workers=workers))
        self._running.append(process)
        return process

    def release(self, process: RunProcess) -> None:
        self._running.remove(process)

    def close(self) -> None:
        pass
