"""Train many runs at once, each in a process of its own. A run that fails does not stop the others."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedadc.config.settings import Config
from fedadc.errors import BUG, CannotResume, Diverged, FedadcError, WorkersLost, explained, one_line
from fedadc.evaluation.evaluator import reaches
from fedadc.runs.layout import MODEL
from fedadc.runs.record import load_config, model_origin, read_run
from fedadc.runs.runner import RunResult, run
from fedadc.system.processes import blocked_interrupts

Watcher = Callable[[int, str, dict[str, Any] | None], None]  # runs in all, and label and last record of one that ended


@dataclass(frozen=True)
class Trial:
    """One run of the experiment: one setting of one label with one seed."""

    label: str
    number: int  # the setting's position in the grid, from 1
    setting: dict[str, Any]  # key.sub -> value
    config: Config
    folder: str


def unfinished(trials: Sequence[Trial], out: Path) -> list[Trial]:
    """The trials that have no finished run in `out`."""
    return [trial for trial in trials if not _finished(out / trial.folder, trial.config)]


KILLED = (
    "a training process was killed, so this run and others are not finished; if memory is short, use fewer `jobs` "
    "(finished runs are kept)."
)


@dataclass(frozen=True)
class TrialFailure:
    """Why a trial ended early; it is sent from a process of the pool."""

    message: str
    exit_code: int
    trace: str = ""  # the traceback of a bug

    @property
    def diverged(self) -> bool:
        """True for divergence, which is a result like any other."""
        return self.exit_code == Diverged.exit_code


class RunsFailed(FedadcError):
    """Some runs failed. The exit code is that of the first, in the order of the experiment."""

    def __init__(self, failures: Mapping[Path, TrialFailure]) -> None:
        self.sentences = [str(FedadcError(f"{path}: {failure.message}")) for path, failure in failures.items()]
        self.trace = next((failure.trace for failure in failures.values() if failure.trace), "")
        self.exit_code = next(iter(failures.values())).exit_code
        super().__init__(" ".join(self.sentences))


def run_trials(
    trials: Sequence[Trial], out: Path, jobs: int, data_dir: Path | None, watch: Watcher | None = None
) -> set[str]:
    """Train these trials, `jobs` at once; returns the folders of those that diverged.

    A trial that fails for another reason does not stop the others. All failures are reported at the end, `RunsFailed`.
    """
    results: dict[str, dict[str, Any] | TrialFailure] = {}  # by the folder of the trial
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_exit_with_parent) as pool:
        try:
            with blocked_interrupts():
                running = {
                    pool.submit(_train, t.config.tree(), t.config.folder, out / t.folder, data_dir): t for t in trials
                }
            for done in as_completed(running):
                trial = running[done]
                result = results[trial.folder] = done.result()
                if watch is not None:
                    watch(len(trials), trial.label, {} if isinstance(result, TrialFailure) else result)
        except BrokenProcessPool:  # which ends the other trials too
            first = next(t for t in trials if t.folder not in results)
            results[first.folder] = TrialFailure(KILLED, WorkersLost.exit_code)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    failures = {t.folder: r for t in trials if isinstance(r := results.get(t.folder), TrialFailure)}
    if not all(failure.diverged for failure in failures.values()):
        raise RunsFailed({out / folder: failure for folder, failure in failures.items() if not failure.diverged})
    return set(failures)


def _exit_with_parent() -> None:
    """End this process of the pool when its parent ends; else it would wait forever for work from a killed parent."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _train(tree: Mapping[str, Any], folder: Path, out: Path, data_dir: Path | None) -> dict[str, Any] | TrialFailure:
    """Train in a process of the pool; returns the last record."""
    try:
        config = load_config(tree, folder=folder)
        return _run_or_resume(config, out, data_dir).history[-1]
    except Exception as error:  # a bug in a user's own method must not stop the other runs
        known = explained(error)
        if known is None:
            return TrialFailure(f"{type(error).__name__}: {one_line(error)}", BUG, traceback.format_exc())
        return TrialFailure(str(known), known.exit_code)


def _run_or_resume(config: Config, out: Path, data_dir: Path | None) -> RunResult:
    """Resume from the last checkpoint, or start again if there is none that fits the config."""
    try:
        return run(config, out=out, resume=True, data_dir=data_dir, notes=lambda _: None)
    except CannotResume:
        return run(config, out=out, overwrite=True, data_dir=data_dir, notes=lambda _: None)


def _finished(path: Path, config: Config) -> bool:
    try:
        last = read_run(path).records[-1]
    except FedadcError:
        return False
    # The model of an earlier round was saved at an interruption; 0: the file does not say its round.
    is_final = (path / MODEL).is_file() and model_origin(path / MODEL)[1] in (last["round"], 0)
    saved = is_final or not config.method.federated
    return saved and bool(last["round"] == config.rounds or reaches(last, config.stop.accuracy))
