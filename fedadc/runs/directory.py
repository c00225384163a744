"""Write a run directory during training: metrics, checkpoints and models. A crash at any time damages no file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from fedadc.config.build import TrainingPlan, with_new_options
from fedadc.config.ending import BEST
from fedadc.config.settings import Config
from fedadc.errors import (
    CannotResume,
    DataError,
    DiskError,
    Diverged,
    FedadcError,
    RunDamaged,
    kind_of_failure,
    one_line,
    require,
)
from fedadc.runs.best import best_of
from fedadc.runs.checkpoint import Checkpoints, CheckpointTimer, check_room
from fedadc.runs.environment import Facts, environment_changes, read_facts, resumed_environment, text_of
from fedadc.runs.fingerprint import config_fingerprint, require_same_settings
from fedadc.runs.layout import (
    BEST_MODEL,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    LOCK,
    METRICS,
    MODEL,
    PARTIAL,
    PREPROCESSING,
    RAY_LOGS,
    REPLACED,
    SEAL,
    SITES,
    STATES,
    TRACE,
    is_checkpoints,
    is_personal,
    model_file,
)
from fedadc.runs.manifest import FilePrefix
from fedadc.runs.preprocessing import as_file, preprocessing_of
from fedadc.runs.record import model_facts, model_origin, record_of, recorded_config
from fedadc.runs.seal import seal_run
from fedadc.system.files import folder_lock, to_safetensors, write_file, write_text
from fedadc.system.signals import deferred_signals
from fedadc.tasks import JUDGED_BY
from fedadc.training.state import Metrics, Round
from fedadc.training.state_files import remove_temporary_folders

log = logging.getLogger("fedadc")
FILES = (CONFIG, METRICS, MODEL, ENVIRONMENT, SEAL, PREPROCESSING, TRACE, SITES)


class MetricsFile:
    """metrics.jsonl, opened for appending. A line is written completely or not at all."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Open the file and truncate it to its first `size` bytes."""
        content = _read_prefix(path, size)
        self.records = [json.loads(line) for line in content.splitlines()]
        self._last = content.rfind(b"\n", 0, -1) + 1  # where the last line begins
        self._digest_before_last = hashlib.sha256(content[: self._last])
        self._size, self._digest = size, hashlib.sha256(content)
        self._stream = path.open("ab", buffering=0)
        self._stream.truncate(size)

    def flush(self) -> FilePrefix:
        """Flush all lines to the disk; return their size and checksum."""
        os.fsync(self._stream.fileno())
        return FilePrefix(self._size, self._digest.hexdigest())

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            written = self._stream.write(line)
            while written < len(line):
                written += self._stream.write(line[written:])
        except BaseException:  # a full disk may have stored a part of the line
            self._stream.truncate(self._size)
            raise
        self._last, self._digest_before_last = self._size, self._digest.copy()
        self._size += len(line)
        self._digest.update(line)
        self.records.append(record)

    def replace_last(self, record: dict[str, Any]) -> None:
        self._stream.truncate(self._last)
        self._size, self._digest = self._last, self._digest_before_last
        self.records.pop()
        self.append(record)

    def close(self) -> None:
        self._stream.close()


def metrics_prefix(path: Path, size: int) -> FilePrefix | None:
    """Size and checksum of the first `size` bytes of a file; None if the file is shorter."""
    content = _read_prefix(path, size)
    return FilePrefix(size, hashlib.sha256(content).hexdigest()) if len(content) == size else None


def _read_prefix(path: Path, size: int) -> bytes:
    require(path.is_file() or not path.exists(), f"{path} is not a file.", DataError)
    if not path.exists() or not 0 < size <= path.stat().st_size:
        return b""
    with path.open("rb") as stream:
        return stream.read(size)


class RunDirectory:
    """The directory of a run that is being trained: `create` a new one, or `reopen` one to resume its run.

    It is created only after all settings have been checked, so that an invalid config leaves no files.
    """

    def __init__(self, path: Path, plan: TrainingPlan) -> None:
        self.path, self.plan = path, plan
        self.state = plan.federation.start()  # after the last recorded round
        self.history: list[dict[str, Any]] = []
        self._timer, self.best = CheckpointTimer(plan.config.checkpoint), best_of(plan)
        self._created_here = False  # True if this process created the run, False if it resumed it
        self._replaced: Path | None = None  # where the run is kept that this one overwrites
        self._resources = ExitStack()  # the lock and the metrics file
        with self._released_on_failure():
            self._resources.enter_context(folder_lock(path))
            self.checkpoints = Checkpoints(path / CHECKPOINTS, plan.federation, config_fingerprint(plan.config))

    @classmethod
    def create(cls, path: Path, plan: TrainingPlan, facts: Facts, overwrite: bool = False) -> Self:
        """Start a new run. `facts` describe the environment; with `overwrite`, the run may replace another one."""
        directory = cls(path, plan)
        with directory._released_on_failure():
            if not is_unstarted(path):  # another process may have started a run meanwhile
                require_empty(path, overwrite)
            check_room(shutil.disk_usage(path).free, plan.federation, directory.best is not None)
            directory._move_old_run_aside()
        directory._created_here = True
        try:
            with directory._reporting_write_errors():
                settings = {**facts, "settings": directory.checkpoints.config}
                write_text(path / ENVIRONMENT, json.dumps(settings, indent=2) + "\n")
                write_file(path / PREPROCESSING, as_file(preprocessing_of(plan.federation)))
                seal_run(path, plan.config, log.warning)
                write_text(path / CONFIG, plan.config.yaml())  # from now on this is a run that can be resumed
                directory._open_metrics()
        except BaseException:
            directory._discard()
            raise
        return directory

    @classmethod
    def reopen(
        cls, path: Path, plan: TrainingPlan, facts: Facts, warn: Callable[[str], None], original: Config | None = None
    ) -> Self:
        """Resume a run from its newest good checkpoint, or from the start if it never reached a checkpoint.

        `original` is the config in the directory, if it has been read already.
        """
        directory = cls(path, plan)
        with directory._released_on_failure():
            original = original or recorded_config(path, given=plan.config.classes())
            require_same_settings(with_new_options(original), with_new_options(plan.config), str(path))
            before, metrics = read_facts(path), path / METRICS
            directory.checkpoints.config = text_of(before, "settings") or directory.checkpoints.config
            found = directory.checkpoints.newest(lambda size: metrics_prefix(metrics, size), warn)
            directory.state = found or directory.state
            _require_resumable(path, directory.state.round, plan.config.rounds)
            last = directory.checkpoints.last
            directory._open_metrics(0 if last is None else last.metrics.bytes)
            directory.best = best_of(plan, directory.history, directory.checkpoints.best, directory.state)
            directory.checkpoints.clean_up()
            _remove_leftovers(path)
            write_text(path / CONFIG, plan.config.yaml())
            if before and (changes := environment_changes(before, facts)):
                warn(f"{path} was trained in another environment: {', '.join(changes)}; bits may differ from now on")
            now = {**facts, "settings": directory.checkpoints.config}
            text = json.dumps(resumed_environment(before, now, directory.state.round), indent=2)
            write_text(path / ENVIRONMENT, text + "\n")
            write_file(path / PREPROCESSING, as_file(preprocessing_of(plan.federation)))
            seal_run(path, plan.config, warn)
            for replaced in path.glob(f"{REPLACED}*"):
                warn(f"{replaced} contains the run that this one replaces; it is deleted when this run is finished")
        return directory

    def _open_metrics(self, size: int = 0) -> None:
        self._metrics = MetricsFile(self.path / METRICS, size)
        self._resources.callback(self._metrics.close)
        self.history = self._metrics.records

    def append(self, result: Round) -> None:
        """Record a round, and write a checkpoint if one is due."""
        record = record_of(result)
        with self._reporting_write_errors():
            self._metrics.append(record)
            self.state = result.state
            self._see(record)
            # always after the first round, so that a longer run without checkpoints must have lost them
            if self.checkpoints.last is None or self._timer.due(result.round):
                self._checkpoint()

    @property
    def last_round_evaluated(self) -> bool:
        """True if the last round was evaluated, or if there is no data to evaluate on."""
        return not self.plan.federation.counter.splits or any(name in self.history[-1] for name in JUDGED_BY)

    def add_to_last_record(self, metrics: Metrics) -> None:
        """Add metrics to the last record, if that round was not planned to be the last and was not evaluated."""
        with self._reporting_write_errors():
            self._metrics.replace_last({**self.history[-1], **metrics})
            self._see(self.history[-1])
            self.checkpoints.write(self.state, self._metrics.flush())

    def _see(self, record: Mapping[str, Any]) -> None:
        """Keep the best model by the record of the last round, for the next checkpoint."""
        if self.best is not None:
            self.best.see(self.state, record)
            self.checkpoints.best = self.best.kept

    def _checkpoint(self) -> None:
        if self.checkpoints.round < self.state.round:
            prefix = self._metrics.flush()
            _ = self.checkpoints.data  # computed only once, so it is no part of the cost of a checkpoint
            began = time.monotonic()
            self.checkpoints.write(self.state, prefix)
            self._timer.took(began)

    def finish(self) -> None:
        """Write the last checkpoint and the models, and delete the run that this one replaces."""
        with self._reporting_write_errors(), deferred_signals():
            self._checkpoint()
            self._write_models()
            for replaced in self.path.glob(f"{REPLACED}*"):
                shutil.rmtree(replaced, ignore_errors=True)
        self._resources.close()

    def _write_models(self) -> None:
        """Write all models; the first one, by which the run is judged, is model.safetensors."""
        for index, (name, state_dict) in enumerate(self.plan.federation.models(self.state).items()):
            file = self.path / (model_file(name) if index else MODEL)
            write_file(file, to_safetensors(state_dict, model_facts(name, self.state.round)))
        written = self.best is not None and self.best.write(self.path)
        if not written and model_origin(self.path / BEST_MODEL)[0] == BEST:
            (self.path / BEST_MODEL).unlink(missing_ok=True)  # it is not the best any more

    def save_after_interruption(self, reason: BaseException) -> str | None:
        """Save the rounds that were trained before an error or a signal; return a message that says how to resume.

        A new run without a finished round is removed instead, and None is returned.
        """
        with deferred_signals(drop=True):
            if self._created_here and not self.state.round:
                self._discard()
                return None
            problem = ""
            for save in (self._checkpoint, self._write_models) if self.state.round else ():
                try:
                    with self._reporting_write_errors():
                        save()
                except Exception as error:  # such as a bug in a user-defined method; keep the checkpoint anyway
                    problem = f"{one_line(error)}; " if str(error) != str(reason) else problem
            self._resources.close()
            replaced = " and still contains the run that it replaces" if any(self.path.glob(f"{REPLACED}*")) else ""
            progress = f"round {self.checkpoints.round} of {self.plan.config.rounds}"
            saved = f"{problem}{self.path} is saved at {progress}{replaced}"
            if isinstance(reason, Diverged):  # a resumed run would diverge again
                return f"{saved}; a new run with other settings can start from its model with model.weights"
            return f"{saved}; resume it with `fedadc resume {shlex.quote(str(self.path))}`"

    def _move_old_run_aside(self) -> None:
        """Move the old run into a subfolder: all of its files or none. Only renames are needed, no copies."""
        old = [file for file in folder_contents(self.path) if not file.name.startswith(REPLACED)]
        if not old:
            return
        self._replaced = Path(tempfile.mkdtemp(prefix=REPLACED, dir=self.path))
        try:
            for file in old:
                file.replace(self._replaced / file.name)
        except BaseException:
            self._restore_old_run()
            raise

    def _restore_old_run(self) -> None:
        if self._replaced:
            for file in self._replaced.iterdir():
                file.replace(self.path / file.name)
            self._replaced.rmdir()

    def _discard(self) -> None:
        """Remove a run that never finished a round, and restore the run that it was to replace."""
        with suppress(OSError):
            for file in folder_contents(self.path):
                if file.is_file() and _is_run_file(file):
                    file.unlink()
            for folder in (self.checkpoints.states.path, self.checkpoints.folder):
                with suppress(OSError):
                    folder.rmdir()  # if it is empty, as it should be: no round was finished
            shutil.rmtree(self.path / RAY_LOGS, ignore_errors=True)
            remove_temporary_folders(self.path)
            self._restore_old_run()
        self._resources.close()
        with suppress(OSError):
            self.path.rmdir()  # if it is empty

    @contextmanager
    def _released_on_failure(self) -> Iterator[None]:
        """Release the lock and close the metrics file if an error occurs."""
        try:
            with self._reporting_write_errors():
                yield
        except BaseException:
            self._resources.close()
            with suppress(OSError):
                self.path.rmdir()  # if it is empty
            raise

    @contextmanager
    def _reporting_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskError(f"cannot write to {self.path} ({error.strerror or error}).") from error


def _require_resumable(path: Path, done: int, rounds: int) -> None:
    """Reject a run that has lost its checkpoints, and a number of rounds below those already done."""
    has_rounds = (path / METRICS).is_file() and (path / METRICS).read_bytes().count(b"\n") > 1
    if not done and (has_rounds or (path / MODEL).exists()):
        raise RunDamaged(
            f"the run in {path} cannot be resumed because its checkpoints are missing, and nothing was changed; "
            "restore them, or start again with `overwrite`."
        )
    if rounds < done:
        raise CannotResume(f"the run in {path} has {done} rounds already; rounds must be at least that, not {rounds}.")


def require_empty(path: Path, overwrite: bool) -> None:
    """Reject a folder that is not empty; with `overwrite`, accept one that contains only a run."""
    contents = folder_contents(path)
    if not contents:
        return
    require(
        overwrite,
        f"{path} is not empty; choose another `out`, or use `resume` to resume the run in it, or `overwrite` to "
        "replace it.",
    )
    foreign = [p.name for p in contents if not _is_run_file(p)]
    require(
        not foreign,
        f"{path} contains {', '.join(sorted(foreign)[:3])}, which is not part of a run; choose another `out`.",
    )


def is_unstarted(path: Path) -> bool:
    """True if a folder is empty, or contains only the first files of a run that was killed while it started."""
    return all(
        p.name.removesuffix(PARTIAL) in (ENVIRONMENT, PREPROCESSING, SEAL)
        or p.name == CONFIG + PARTIAL
        or p.name.startswith(REPLACED)
        for p in folder_contents(path)
    )


def folder_contents(path: Path) -> list[Path]:
    """The files and folders in a folder, except its lock file; none if the folder does not exist."""
    try:
        require(not path.exists() or path.is_dir(), f"{path} is a file; `out` needs a folder.")
        return [p for p in path.iterdir() if p.name != LOCK] if path.is_dir() else []
    except (OSError, ValueError) as error:
        raise kind_of_failure(error, FedadcError)(
            f"`out`: {str(path)[:60]} is not a usable folder ({error})."
        ) from error


def _is_run_file(file: Path) -> bool:
    """True if a file or folder in a run directory was written by fedadc."""
    if file.is_dir():
        ours = file.name.startswith((STATES, REPLACED)) or file.name == RAY_LOGS
        return ours or is_checkpoints(file) or is_personal(file)
    plain, partial_model = file.name.removesuffix(PARTIAL), model_file("*") + PARTIAL
    return plain in (*FILES, LOCK) or file.match(partial_model) or file.name == model_file(model_origin(file)[0])


def _remove_leftovers(path: Path) -> None:
    """Remove the incomplete files and the temporary client states of a killed process."""
    for file in path.glob(f"*{PARTIAL}"):
        if is_personal(file):
            shutil.rmtree(file, ignore_errors=True)
        elif file.is_file() and _is_run_file(file):
            file.unlink(missing_ok=True)
    remove_temporary_folders(path)
