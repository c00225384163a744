"""The run directory, written as a run goes: whole lines, whole files, one writer at a time."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from fedadc.config.build import Plan
from fedadc.errors import CannotResume, Diverged, FedadcError, one_line, require
from fedadc.evaluation.evaluator import JUDGED_BY
from fedadc.runs.checkpoint import Checkpoints, CheckpointTimer, FilePrefix, check_room
from fedadc.runs.environment import Facts, changes_of, gone_on, read_facts, text_of
from fedadc.runs.fingerprint import config_fingerprint, require_same
from fedadc.runs.layout import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    LOCK,
    METRICS,
    MODEL,
    PARTIAL,
    REPLACED,
    STATES,
    is_personal,
    model_file,
)
from fedadc.runs.record import load_config, model_facts, model_origin, record_of
from fedadc.system.files import folder_lock, to_safetensors, write_file, write_text
from fedadc.system.signals import deferred_signals
from fedadc.training.state import Metrics, Round

FILES = (CONFIG, METRICS, MODEL, ENVIRONMENT)


class MetricsFile:
    """metrics.jsonl: a line is there whole or not at all."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """With its first so many bytes."""
        content = _start_of(path, size)
        self.records = [json.loads(line) for line in content.splitlines()]
        self._size, self._digest = size, hashlib.sha256(content)
        self._stream = path.open("ab", buffering=0)
        self._stream.truncate(size)

    def mark(self) -> FilePrefix:
        """Of all lines so far, which have then reached the disk."""
        os.fsync(self._stream.fileno())
        return FilePrefix(self._size, self._digest.hexdigest())

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


def metrics_prefix(path: Path, size: int) -> FilePrefix | None:
    """Of the first so many bytes, if there are so many."""
    content = _start_of(path, size)
    return FilePrefix(size, hashlib.sha256(content).hexdigest()) if len(content) == size else None


def _start_of(path: Path, size: int) -> bytes:
    require(path.is_file() or not path.exists(), f"{path} is not a file.")
    if not path.exists() or not 0 < size <= path.stat().st_size:
        return b""
    with path.open("rb") as stream:
        return stream.read(size)


class RunDirectory:
    """Writes a run: `begun` anew, or `reopened` to go on. Created only when everything that can be checked has been."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan = path, plan
        self.state = plan.federation.start()  # after the last recorded round
        self.history: list[dict[str, Any]] = []
        self._pace = CheckpointTimer(plan.config.checkpoint)
        self._was_begun = False  # by this process
        self._replaced: Path | None = None
        self._held = ExitStack()
        with self._letting_go_on_failure():
            self._held.enter_context(folder_lock(path))
            self.checkpoints = Checkpoints(path / CHECKPOINTS, plan.federation, config_fingerprint(plan.config))

    @classmethod
    def begun(cls, path: Path, plan: Plan, facts: Facts, overwrite: bool = False) -> Self:
        directory = cls(path, plan)
        with directory._letting_go_on_failure():
            if not is_unstarted(path):  # somebody else may have begun one meanwhile
                require_empty(path, overwrite)
            check_room(shutil.disk_usage(path).free, plan.federation)
            directory._put_aside()
        directory._was_begun = True
        try:
            with directory._writing():
                settings = {**facts, "settings": directory.checkpoints.config}
                write_text(path / ENVIRONMENT, json.dumps(settings, indent=2) + "\n")
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
        with directory._letting_go_on_failure():
            require_same(load_config(path / CONFIG), plan.config, str(path))
            before, metrics = read_facts(path), path / METRICS
            directory.checkpoints.config = text_of(before, "settings") or directory.checkpoints.config
            found = directory.checkpoints.newest(lambda size: metrics_prefix(metrics, size), warn)
            directory.state = found or directory.state
            _require_a_place_to_go_on(path, directory.state.round, plan.config.rounds)
            last = directory.checkpoints.last
            directory._open_metrics(0 if last is None else last.metrics.bytes)
            directory.checkpoints.sweep()
            _sweep(path)
            write_text(path / CONFIG, plan.config.yaml())
            if before and (changes := changes_of(before, facts)):
                warn(f"this is not where {path} was trained so far: {', '.join(changes)}; bits may differ from here on")
            now = {**facts, "settings": directory.checkpoints.config}
            text = json.dumps(gone_on(before, now, directory.state.round), indent=2)
            write_text(path / ENVIRONMENT, text + "\n")
            for replaced in path.glob(f"{REPLACED}*"):
                warn(f"{replaced} holds the run that this one replaces; it is deleted when this one is finished")
        return directory

    def _open_metrics(self, size: int = 0) -> None:
        self._metrics = MetricsFile(self.path / METRICS, size)
        self._held.callback(self._metrics.close)
        self.history = self._metrics.records

    def append(self, result: Round) -> None:
        """Record a round, and write a checkpoint if one is due."""
        record = record_of(result)
        with self._writing():
            self._metrics.append(record)
            self.state = result.state
            self.history.append(record)
            # always after the first round: a run with more rounds and no checkpoint has lost its own
            if self.checkpoints.last is None or self._pace.due(result.round):
                self._checkpoint()

    @property
    def evaluated(self) -> bool:
        """Whether the last round was, as a last round should be."""
        return not self.plan.federation.counter.splits or any(name in self.history[-1] for name in JUDGED_BY)

    def amend(self, metrics: Metrics) -> None:
        """Add metrics to the last record: of a round that was not meant to be the last."""
        record = {**self.history.pop(), **metrics}
        with self._writing():
            self._metrics.close()
            size = sum(len(json.dumps(r, allow_nan=False)) + 1 for r in self.history)
            self._open_metrics(size)
            self._metrics.append(record)
            self.history.append(record)
            self.checkpoints.write(self.state, self._metrics.mark())

    def _checkpoint(self) -> None:
        if self.checkpoints.round < self.state.round:
            mark = self._metrics.mark()
            _ = self.checkpoints.data  # made once, so it says nothing about what the next one costs
            began = time.monotonic()
            self.checkpoints.write(self.state, mark)
            self._pace.took(began)

    def finish(self) -> None:
        """Write the last checkpoint and the models; the run that stood here before is now replaced."""
        with self._writing(), deferred_signals():
            self._checkpoint()
            self._write_models()
            for replaced in self.path.glob(f"{REPLACED}*"):
                shutil.rmtree(replaced, ignore_errors=True)
        self._held.close()

    def _write_models(self) -> None:
        """The first, by which the run is judged, under the plain name."""
        for index, (name, state_dict) in enumerate(self.plan.federation.models(self.state).items()):
            file = self.path / (model_file(name) if index else MODEL)
            write_file(file, to_safetensors(state_dict, model_facts(name, self.state.round)))

    def leave(self, reason: BaseException) -> str | None:
        """Keep what was done of a run that cannot go on now; a sentence that says what that is, if it is anything."""
        with deferred_signals(for_good=True):
            if self._was_begun and not self.state.round:
                self._discard()
                return None
            problem = ""
            for keep in (self._checkpoint, self._write_models) if self.state.round else ():
                try:
                    with self._writing():
                        keep()
                except Exception as error:  # also a bug in a user's `evaluated`: the checkpoint is kept all the same
                    problem = f"{one_line(error)}; " if str(error) != str(reason) else problem
            self._held.close()
            at, command = self.checkpoints.round, f"`fedadc resume {shlex.quote(str(self.path))}`"
            old = ", in which the run that it replaces still waits," if any(self.path.glob(f"{REPLACED}*")) else ""
            stands = f"{problem}{self.path}{old} stands at round {at} of {self.plan.config.rounds}"
            if isinstance(reason, Diverged):  # to go on would end in the same
                return f"{stands}; a new run with other settings can start from its model with model.weights"
            return f"{stands}; {command} goes on from there"

    def _put_aside(self) -> None:
        """A run that stands here, in a folder below, so that nothing is ever copied; all of it or nothing."""
        old = [file for file in held_in(self.path) if not file.name.startswith(REPLACED)]
        if not old:
            return
        self._replaced = Path(tempfile.mkdtemp(prefix=REPLACED, dir=self.path))
        try:
            for file in old:
                file.replace(self._replaced / file.name)
        except BaseException:
            self._bring_back()
            raise

    def _bring_back(self) -> None:
        if self._replaced:
            for file in self._replaced.iterdir():
                file.replace(self.path / file.name)
            self._replaced.rmdir()

    def _discard(self) -> None:
        """Take back a run that never finished a round, and bring back the one that it was to replace."""
        with suppress(OSError):
            for file in held_in(self.path):
                if file.name.startswith(STATES) or file.name == CHECKPOINTS:
                    shutil.rmtree(file, ignore_errors=True)
                elif not file.name.startswith(REPLACED) and _is_of_a_run(file):
                    file.unlink()
            self._bring_back()
        self._held.close()
        with suppress(OSError):
            self.path.rmdir()  # if it is empty

    @contextmanager
    def _letting_go_on_failure(self) -> Iterator[None]:
        try:
            with self._writing():
                yield
        except BaseException:
            self._held.close()
            with suppress(OSError):
                self.path.rmdir()  # if it is empty
            raise

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FedadcError(f"cannot write to {self.path} ({error.strerror or error}).") from error


def _require_a_place_to_go_on(path: Path, done: int, rounds: int) -> None:
    """Refuse to begin again where there was more than a beginning, and to go back."""
    began = (path / METRICS).is_file() and (path / METRICS).read_bytes().count(b"\n") > 1
    if not done and (began or (path / MODEL).exists()):
        raise CannotResume(
            f"the run in {path} has lost its checkpoints, so it cannot go on, and nothing was changed; bring them back "
            "or begin anew with --overwrite."
        )
    if rounds < done:
        raise CannotResume(f"the run in {path} has {done} rounds already; rounds must be at least that, not {rounds}.")


def require_empty(path: Path, overwrite: bool) -> None:
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


def is_unstarted(path: Path) -> bool:
    """Whether a folder holds nothing, or what a run had written that was killed before it began."""
    return all(
        p.name.removesuffix(PARTIAL) == ENVIRONMENT or p.name == CONFIG + PARTIAL or p.name.startswith(REPLACED)
        for p in held_in(path)
    )


def held_in(path: Path) -> list[Path]:
    """What a folder holds, beside a lock that somebody left."""
    try:
        require(not path.exists() or path.is_dir(), f"{path} is a file; --out needs a folder.")
        return [p for p in path.iterdir() if p.name != LOCK] if path.is_dir() else []
    except (OSError, ValueError) as error:
        raise FedadcError(f"--out: {str(path)[:60]} is no usable folder ({error}).") from error


def _is_of_a_run(file: Path) -> bool:
    if file.is_dir():
        return file.name.startswith((STATES, REPLACED)) or file.name == CHECKPOINTS or is_personal(file)
    plain, half_a_model = file.name.removesuffix(PARTIAL), model_file("*") + PARTIAL
    return plain in (*FILES, LOCK) or file.match(half_a_model) or file.name == model_file(model_origin(file)[0])


def _sweep(path: Path) -> None:
    """Remove what a killed process had begun to write, and the states that it kept for itself."""
    for file in [*path.glob(f"*{PARTIAL}"), *path.glob(f"{STATES}*")]:
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        elif _is_of_a_run(file):
            file.unlink(missing_ok=True)
