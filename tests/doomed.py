"""Processes of `fedadc ...` that end before their time: killed from outside, or by themselves at a chosen point."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import yaml

from fedadc.system.processes import context, start_process_server

STARTING = threading.Lock()  # multiprocessing looks after all of its children whenever it starts one
PRELOADED = ("fedadc.engines.worker", "fedadc.cli.app", "fedadc.cli.terminal")  # most of the time of a short command
PATIENCE = 120  # seconds until a process that does not end is a failure


@dataclass(frozen=True)
class Doom:
    """The point at which a process ends itself: before or after its n-th such call on a file in a folder."""

    call: str  # fsync, replace or unlink; or append, in the middle of a line of the metrics
    after: bool
    number: int
    folder: str
    by: int = signal.SIGKILL

    def arm(self) -> None:
        """What had not been flushed is lost, as when the power goes."""
        count, flushed = itertools.count(1), set[str]()

        def die(path: str) -> None:
            if path not in flushed and self.call in ("fsync", "replace") and Path(path).is_file():
                os.truncate(path, random.randint(0, Path(path).stat().st_size))
            os.kill(os.getpid(), self.by)

        def watched(call: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def calling(file: Any, *rest: Any, **kw: Any) -> None:
                path = str(Path(f"/proc/self/fd/{file}").readlink()) if isinstance(file, int) else os.fspath(file)
                strikes = call == self.call and path.startswith(self.folder) and next(count) == self.number
                if strikes and not self.after:
                    die(path)
                original(file, *rest, **kw)
                if call == "fsync":
                    flushed.add(path)
                if call == "replace" and path in flushed:
                    flushed.add(os.fspath(rest[0]))
                if strikes:
                    die(os.fspath(rest[0]) if call == "replace" else path)

            return calling

        for call in ("fsync", "replace", "unlink"):
            setattr(os, call, watched(call, getattr(os, call)))
        if self.call == "append":
            self._arm_the_metrics()

    def _arm_the_metrics(self) -> None:
        from fedadc.runs.directory import MetricsFile

        count, whole = itertools.count(1), MetricsFile.append

        def append(metrics: Any, record: Any) -> None:
            if next(count) == self.number:
                metrics._stream.write(json.dumps(record).encode()[: random.randint(1, 100)])
                os.kill(os.getpid(), self.by)
            whole(metrics, record)

        MetricsFile.append = append  # type: ignore[method-assign]


def obey(words: list[str], log: Path, doom: Doom | None, server: str) -> None:
    """`fedadc ...` in this process, which has just been forked from a server that has torch and no threads.

    Its workers come from the same server: one of its own would need seconds to import torch.
    """
    forkserver._forkserver._forkserver_address = server  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # workers, which this server is for, never hear one
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.argv = ["fedadc", *words]
    if doom is not None:
        doom.arm()
    from fedadc.cli.app import main

    main()


class Life:
    """A process of `fedadc ...`: forked, which is quick, or started as a user does."""

    def __init__(self, words: list[str], log: Path, doom: Doom | None = None, started: bool = False) -> None:
        self.log, self.process = log, None
        if started:
            with log.open("wb") as stream:
                command = [sys.executable, "-m", "fedadc", *words]
                self.started = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
            self.pid = self.started.pid
        else:
            start_process_server(*PRELOADED)
            arguments = (words, log, doom, forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]
            with STARTING:
                self.process = context().Process(target=obey, args=arguments)  # type: ignore[attr-defined]
                self.process.start()
            self.pid = self.process.pid

    def code(self) -> int | None:
        """Negative after a signal, None while it lives."""
        if self.process is None:
            return self.started.poll()
        with STARTING:
            return self.process.exitcode

    def until(self, condition: Callable[[], Any]) -> bool:
        """Wait for something; whether it came before the end."""
        end = time.monotonic() + PATIENCE
        while self.code() is None:
            if condition():
                return True
            assert time.monotonic() < end, f"process {self.pid} hangs:\n{self.printed()}"
            time.sleep(0.001)
        return False

    def end(self) -> int:
        self.until(lambda: False)
        code = self.code()
        assert code is not None
        return code

    def signal(self, number: int) -> None:
        if self.code() is None:
            os.kill(self.pid, number)

    def has_open(self, path: Path) -> bool:
        try:
            return path in {fd.readlink() for fd in Path(f"/proc/{self.pid}/fd").iterdir()}
        except OSError:  # a file that was closed meanwhile
            return False

    def printed(self) -> str:
        return self.log.read_text()

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self.end()


def run_words(config: dict[str, Any], out: Path, workers: int = 0) -> list[str]:
    """`fedadc run` by a config beside the run directory."""
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    return ["run", str(file), "--out", str(out), "--resume", "--workers", str(workers)]


def finished(words: list[str], log: Path, **how: Any) -> str:
    """What a process prints that must come to a good end."""
    with Life(words, log, **how) as life:
        code = life.end()
    assert code == 0, f"exit code {code}:\n{life.printed()}"
    return life.printed()
