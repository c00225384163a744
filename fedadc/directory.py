"""The run directory, written as a run goes: whole lines, whole files, one writer at a time."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

import fedadc
from fedadc.checkpoint import FOLDER as CHECKPOINTS
from fedadc.checkpoint import Checkpoints, Mark, Pace, check_room
from fedadc.durable import PARTIAL, write_durably
from fedadc.errors import CannotResume, FedadcError, require
from fedadc.federation.rounds import Round
from fedadc.federation.store import FILES as STATES
from fedadc.identity import changes_of, mark_of
from fedadc.interrupts import held_back
from fedadc.plan import Plan
from fedadc.record import CONFIG, ENVIRONMENT, METRICS, MODEL, model_file, record_of

LOCK = ".lock"
FILES = (CONFIG, METRICS, MODEL, ENVIRONMENT)
Facts = dict[str, Any]  # of an environment.json


class MetricsFile:
    """metrics.jsonl: a line is there whole or not at all."""

    def __init__(self, path: Path) -> None:
        require(path.is_file() or not path.exists(), f"{path} is not a file.")
        self._stream = path.open("ab+", buffering=0)
        self._size = 0
        self._digest = hashlib.sha256()

    def mark(self) -> Mark:
        """Of all lines so far, which have then reached the disk."""
        os.fsync(self._stream.fileno())
        return Mark(self._size, self._digest.hexdigest())

    def mark_of(self, size: int) -> Mark | None:
        """Of the first so many bytes, if there are so many."""
        content = self._read(size)
        return Mark(size, hashlib.sha256(content).hexdigest()) if len(content) == size else None

    def cut(self, size: int) -> list[dict[str, Any]]:
        """Keep the first so many bytes; the records in them."""
        content = self._read(size)
        self._stream.truncate(size)
        self._size, self._digest = size, hashlib.sha256(content)
        return [json.loads(line) for line in content.splitlines()]

    def append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            written = self._stream.write(line)
            while written < len(line):
                written += self._stream.write(line[written:])
        except BaseException:  # a full disk may have taken a part of it
            self._stream.truncate(self._size)
            raise
        self._size += len(line)
        self._digest.update(line)

    def close(self) -> None:
        self._stream.close()

    def _read(self, size: int) -> bytes:
        self._stream.seek(0)
        return self._stream.read(size) if 0 < size <= os.fstat(self._stream.fileno()).st_size else b""


class RunDirectory:
    """Writes a run: `begun` anew, or `reopened` to go on. Created only when everything that can be checked has been."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan = path, plan
        self.state = plan.federation.start()  # after the last recorded round
        self.history: list[dict[str, Any]] = []
        self.was_begun = False  # by this process
        self._replaced: Path | None = None  # where the run that stood here waits until this one is finished
        self._held = ExitStack()
        with self._opening():
            path.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(locked(path))
        self.checkpoints = Checkpoints(path / CHECKPOINTS, plan.federation, mark_of(plan.config))
        self._pace = Pace(plan.config.checkpoint)

    @classmethod
    def begun(cls, path: Path, plan: Plan, facts: Facts, overwrite: bool = False) -> Self:
        check_free(path, overwrite)
        directory = cls(path, plan)
        directory.was_begun = True
        try:
            with directory._writing():
                check_room(shutil.disk_usage(path).free, plan.federation)
                directory._put_aside()
                write_text(path / ENVIRONMENT, json.dumps(facts, indent=2) + "\n")
                write_text(path / CONFIG, plan.config.yaml())  # with it a run begins to exist
                directory._open_metrics()
        except BaseException:
            directory._discard()
            raise
        return directory

    @classmethod
    def reopened(cls, path: Path, plan: Plan, facts: Facts, warn: Callable[[str], None]) -> Self:
        """From the newest good checkpoint; from the beginning if the run never came to one."""
        directory = cls(path, plan)
        with directory._opening():
            metrics = directory._open_metrics()
            directory.state = directory.checkpoints.newest(metrics.mark_of, warn) or directory.state
            done = directory.state.round
            if plan.config.rounds < done:
                raise CannotResume(
                    f"the run in {path} has {done} rounds already; rounds must be at least that, not "
                    f"{plan.config.rounds}."
                )
            last = directory.checkpoints.last
            directory.history = metrics.cut(0 if last is None else last.metrics.bytes)
            _sweep(path)
            write_text(path / CONFIG, plan.config.yaml())
            directory._note_environment(facts, warn)
        return directory

    def _open_metrics(self) -> MetricsFile:
        self._metrics = MetricsFile(self.path / METRICS)
        self._held.callback(self._metrics.close)
        return self._metrics

    def _note_environment(self, now: Facts, warn: Callable[[str], None]) -> None:
        first = read_facts(self.path)
        if first and (changes := changes_of(first, now)):
            warn(f"this is not where {self.path} was begun: {', '.join(changes)}; bits may differ from here on")
        resumed = [*_list(first.get("resumed")), {"round": self.state.round, **now}]
        write_text(self.path / ENVIRONMENT, json.dumps({**now, **first, "resumed": resumed}, indent=2) + "\n")

    def append(self, result: Round) -> dict[str, Any]:
        """Record a round, and write a checkpoint if one is due."""
        record = record_of(result)
        with self._writing():
            self._metrics.append(record)
            self.state = result.state
            self.history.append(record)
            if self._pace.due(result.round):
                self._checkpoint()
        return record

    def _checkpoint(self) -> None:
        if self.checkpoints.round < self.state.round:
            began = time.monotonic()
            self.checkpoints.write(self.state, self._metrics.mark())
            self._pace.took(began)

    def finish(self) -> None:
        """Write the models, the first, by which the run is judged, under the plain name, and the last checkpoint."""
        with self._writing(), held_back():
            self._write_models()
            self._checkpoint()
            for replaced in self.path.resolve().parent.glob(f"{self._aside}*"):  # also by a process that was killed
                shutil.rmtree(replaced, ignore_errors=True)
        self._held.close()

    def _write_models(self) -> None:
        for index, (name, state_dict) in enumerate(self.plan.federation.models(self.state).items()):
            write_durably(self.path / (model_file(name) if index else MODEL), _model(name, state_dict))

    def leave(self) -> str | None:
        """Keep what was done of a run that cannot go on now; a sentence that says what that is, if it is anything."""
        with held_back(for_good=True):
            return self._left()

    def _left(self) -> str | None:
        if self.was_begun and not self.state.round:
            self._discard()
            return None
        try:
            self.finish()
        except FedadcError as error:
            self._held.close()
            at = self.checkpoints.round
            kept = f"its last checkpoint, of round {at}, is whole" if at else "it has no checkpoint yet"
            return f"{str(error).rstrip('.')}; {kept}: `fedadc resume {self.path}` goes on from there"
        at, rounds = self.state.round, self.plan.config.rounds
        return f"{self.path} stands at round {at} of {rounds}; `fedadc resume {self.path}` goes on from there"

    def _discard(self) -> None:
        """Take back a run that never finished a round, and bring back the one that it was to replace."""
        with suppress(OSError):
            _clear(self.path)
            if self._replaced:
                for file in self._replaced.iterdir():
                    file.replace(self.path / file.name)
                self._replaced.rmdir()
        self._held.close()
        with suppress(OSError):
            self.path.rmdir()  # if it is empty

    def _put_aside(self) -> None:
        old = [file for file in self.path.iterdir() if _is_of_a_run(file) and file.name != LOCK]
        if old:
            self._replaced = Path(tempfile.mkdtemp(prefix=self._aside, dir=self.path.resolve().parent))
            for file in old:
                file.replace(self._replaced / file.name)

    @property
    def _aside(self) -> str:
        return f".{self.path.resolve().name}-replaced-"

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Let go of the folder if it cannot be used."""
        try:
            with self._writing():
                yield
        except BaseException:
            self._held.close()
            raise

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FedadcError(f"cannot write to {self.path} ({error.strerror or error}).") from error


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse a place that holds something; with `overwrite`, only something other than a run."""
    held = held_in(path)
    if not held:
        return
    require(
        overwrite,
        f"{path} is not empty; choose another --out, or give --resume to go on with the run in it, or --overwrite to "
        "replace it.",
    )
    foreign = [p.name for p in held if not _is_of_a_run(p)]
    require(
        not foreign, f"{path} holds {', '.join(sorted(foreign)[:3])}, which is not part of a run; choose another --out."
    )


def never_began(path: Path) -> bool:
    """Whether a folder holds nothing, or what a run had written that was killed before it began."""
    return all(p.name.removesuffix(PARTIAL) == ENVIRONMENT or p.name == CONFIG + PARTIAL for p in held_in(path))


def held_in(path: Path) -> list[Path]:
    """What a folder holds, beside a lock that somebody left."""
    try:
        require(not path.exists() or path.is_dir(), f"{path} is a file; --out needs a folder.")
        return [p for p in path.iterdir() if p.name != LOCK] if path.is_dir() else []
    except (OSError, ValueError) as error:
        raise FedadcError(f"--out: {str(path)[:60]} is no usable folder ({error}).") from error


def _is_of_a_run(file: Path) -> bool:
    if file.is_dir():
        return file.name.startswith(STATES) or file.name == CHECKPOINTS
    return file.name.removesuffix(PARTIAL) in (*FILES, LOCK) or file.name == model_file(_model_in(file))


def _model_in(file: Path) -> str:
    """The name of the model that a run saved in a file; nothing for a file of another origin."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return str((opened.metadata() or {}).get("model", ""))
    except (SafetensorError, OSError):
        return ""


def _model(name: str, state_dict: Mapping[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    content: bytes = save(dict(state_dict), metadata={"model": name})
    return content


def _clear(path: Path) -> None:
    """Remove what a run left in a folder."""
    for file in path.iterdir():
        if file.is_dir() and _is_of_a_run(file):
            shutil.rmtree(file, ignore_errors=True)
        elif _is_of_a_run(file) and file.name != LOCK:
            file.unlink()


def _sweep(path: Path) -> None:
    """Remove what a killed process had begun to write, and the states that it kept for itself."""
    for file in [*path.glob(f"*{PARTIAL}"), *path.glob(f"{STATES}*")]:
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        elif _is_of_a_run(file):
            file.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else writes to a folder meanwhile. The lock goes with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with ExitStack() as held:
        while True:
            file = held.enter_context(path.open("w"))
            try:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:  # a system without it
                break
            except OSError:
                raise FedadcError(
                    f"another process is writing to {folder}; wait for it or choose another --out."
                ) from None
            with suppress(OSError):
                if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                    break  # else its last holder has just taken it away: the file at this path is another
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_durably(path, text.encode())


def read_facts(path: Path) -> Facts:
    """The environment of a run; nothing if it cannot be read."""
    try:
        facts = json.loads((path / ENVIRONMENT).read_text(encoding="utf-8"))
        return facts if isinstance(facts, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def environment(device: str) -> Facts:
    """What a result depends on beside its config."""
    return {
        "fedadc": fedadc.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl_cbwr": os.environ.get("MKL_CBWR"),
        "device": device,
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    """Commit of the folder the command ran in, and whether it held changes; None outside a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
