"""Experiments: train several methods, each with a grid of settings, and compare each at its best setting.

Every method gets the same number of settings, and every setting is trained with every seed. The setting with the best
mean over seeds on validation data is chosen. The table shows its results on test data, which are not used to choose.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import re
import statistics
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fedadc.analysis.compare import AXES, final, higher_is_better
from fedadc.config.build import prepare
from fedadc.config.schema import Schema
from fedadc.config.settings import TABLES, Config, parse_config
from fedadc.config.yaml import overlay, read_yaml, with_value
from fedadc.errors import (
    BUG,
    CannotResume,
    Diverged,
    FedadcError,
    WorkersLost,
    explained,
    one_line,
    require,
    same_kind,
    unknown,
)
from fedadc.evaluation.evaluator import reaches
from fedadc.fields.settings import Settings
from fedadc.runs.layout import MODEL
from fedadc.runs.record import RecordedRun, load_config, model_origin, read_run
from fedadc.runs.runner import RunResult, run
from fedadc.system.files import write_text
from fedadc.system.processes import blocked_interrupts
from fedadc.system.user_code import Notes, UserCode

log = logging.getLogger("fedadc")
CHOICES, PLOT = "choices.json", "convergence.png"  # files in the folder of an experiment


@dataclass(frozen=True, kw_only=True)
class Candidate(Settings):
    """An entry of `runs`, one row of the table: its differences from `base`, and the settings to choose from."""

    set: dict[str, Any] = field(default_factory=dict)  # overrides `base`
    grid: dict[str, list[Any]] = field(default_factory=dict)  # key.sub -> values; all combinations are tried


@dataclass(frozen=True, kw_only=True)
class Experiment(Settings):
    """The content of an experiment file."""

    title: str
    base: dict[str, Any]  # a config without method and seed
    runs: dict[str, Any]  # label -> candidate
    seeds: list[int]
    budget: int  # number of settings per label, the same for all
    choose_by: str = "validation_accuracy"
    target: float | None = None  # the accuracy to reach; the table shows how long it took
    x: str = "round"  # the measure of progress, as in `fedadc compare --x`

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.seeds), "seeds must name at least one seed.")
        require(len(set(self.seeds)) == len(self.seeds), f"seeds must not name a seed twice: {self.seeds}.")
        require(bool(self.runs), "runs must name at least one method.")
        if self.x not in AXES:
            raise unknown("x", self.x, AXES)
        require(self.target is None or 0 < self.target <= 1, f"target must be a share such as 0.9, not {self.target}.")
        require(
            not self.choose_by.startswith("test"),
            f"choose_by is {self.choose_by}, but settings are never chosen on test data; name a validation metric.",
        )

    @property
    def metric(self) -> str:
        """The metric in the table and the plot, for the models (global or personal) that `choose_by` measures."""
        return "personal_accuracy" if self.choose_by.startswith("validation_personal_") else "test_accuracy"


@dataclass(frozen=True)
class Trial:
    """One run of the experiment: one setting of one label with one seed."""

    label: str
    number: int  # the setting's position in the grid, from 1
    setting: dict[str, Any]  # key.sub -> value
    config: Config
    folder: str


@dataclass(frozen=True)
class Choice:
    """The setting that was chosen for a label, and the scores of all its settings."""

    label: str
    setting: dict[str, Any]
    scores: list[tuple[dict[str, Any], float | None]]  # (setting, score); None: training diverged
    runs: list[RecordedRun]  # of the chosen setting; empty if all settings diverged

    def described(self) -> str:
        """The chosen setting as text."""
        return ", ".join(f"{key} {value}" for key, value in self.setting.items()) or (
            "as given" if self.runs else "all diverged"
        )


def read_experiment(path: Path, notes: Notes = log.info) -> tuple[Experiment, list[Trial]]:
    """The experiment in a file and all its trials, whose configs are checked."""
    schema, tree = Schema(TABLES, UserCode(path.resolve().parent, notes)), read_yaml(path)
    require("rounds" not in tree, f"{path} is the config of one run; train it with `fedadc run {path}`.")
    experiment = schema.build(Experiment, tree)
    trials = list(_trials(experiment, schema))
    for trial in trials:
        method, measured = trial.config.method, {"accuracy", "loss", *trial.config.evaluate.metrics} - {"per_class"}
        names = (set() if method.headless else measured) | {f"personal_{m}" for m in measured if method.personalized}
        metrics = sorted(f"validation_{name}" for name in names)
        if experiment.choose_by not in metrics:
            raise FedadcError(
                f"choose_by: {experiment.choose_by} is not measured by runs.{trial.label}; it measures "
                f"{', '.join(metrics)} (see evaluate.metrics)."
            )
    return experiment, trials


def _trials(experiment: Experiment, schema: Schema) -> Iterator[Trial]:
    """Every setting of every label with every seed."""
    folders: dict[str, str] = {}
    for label, tree in experiment.runs.items():
        candidate = schema.build(Candidate, tree or {}, f"runs.{label}")
        grid = [[(key, value) for value in values] for key, values in candidate.grid.items()]
        points = list(product(*grid))
        require(
            len(points) == experiment.budget,
            f"runs.{label}.grid has {len(points)} settings, but the budget is {experiment.budget} for every run.",
        )
        slug = re.sub(r"[^\w+]+", "-", label.lower()).strip("-")
        require(bool(slug), f"runs: the label {label!r} has no letter or digit to name its folder after.")
        other = folders.setdefault(slug, label)
        require(other == label, f"runs {other!r} and {label!r} would share the folder {slug!r}; rename one of them.")
        hashes = set()
        for number, point in enumerate(points, start=1):
            tree = overlay(experiment.base, candidate.set)
            for key, value in point:
                tree = with_value(tree, key, value)
            for seed in experiment.seeds:
                config = parse_config({**tree, "seed": seed, "label": label}, schema.code)
                require(
                    config.data.validation is not None,
                    f"runs.{label} has no validation data to choose a setting by; set data.validation.",
                )
                setting_hash = _hash_without_seed(config)
                yield Trial(label, number, dict(point), config, f"{slug}/{setting_hash}-seed{seed}")
            require(setting_hash not in hashes, f"runs.{label}.grid has the setting {dict(point)} twice.")
            hashes.add(setting_hash)


def _hash_without_seed(config: Config) -> str:
    """A short hash of a config without its seed. It names folders, so a changed experiment never reuses old runs."""
    tree = {key: value for key, value in config.tree().items() if key != "seed"}
    return hashlib.blake2b(json.dumps(tree, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()


def unfinished(trials: Sequence[Trial], out: Path) -> list[Trial]:
    """The trials that have no finished run in `out`."""
    return [trial for trial in trials if not _finished(out / trial.folder, trial.config)]


def check_rows(trials: Sequence[Trial], data_dir: Path | None) -> None:
    """Check the first config of every label with its data, so that a mistake is found before anything is trained."""
    checked: set[str] = set()
    for trial in trials:
        if trial.label not in checked:
            checked.add(trial.label)
            try:
                prepare(trial.config, data_dir)
            except FedadcError as error:
                raise same_kind(error, f"runs.{trial.label}: {error}") from error


KILLED = (
    "a training process was killed, so this run and others are not finished; if memory is short, use fewer --jobs "
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
    trials: Sequence[Trial], out: Path, jobs: int, data_dir: Path | None, watch: Callable[[str, dict[str, Any]], None]
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
                watch(trial.label, {} if isinstance(result, TrialFailure) else result)
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


def choose(experiment: Experiment, trials: Sequence[Trial], out: Path, diverged: Collection[str]) -> list[Choice]:
    """The best setting of every label, by the mean over seeds on validation data; of equal ones the first."""
    choices = []
    sign = 1 if higher_is_better(experiment.choose_by) else -1
    for label in experiment.runs:
        settings: dict[int, list[Trial]] = {}
        for trial in trials:
            if trial.label == label:
                settings.setdefault(trial.number, []).append(trial)
        scores: dict[int, float] = {}
        for number, members in settings.items():
            if not any(t.folder in diverged for t in members):
                scores[number] = statistics.mean(final(read_run(out / t.folder), experiment.choose_by) for t in members)
        best = settings[max(scores, key=lambda number: sign * scores[number])] if scores else []
        all_scores = [(members[0].setting, scores.get(number)) for number, members in settings.items()]
        runs = [read_run(out / t.folder) for t in best]
        choices.append(Choice(label, best[0].setting if best else {}, all_scores, runs))
    return choices


def write_choices(choices: Sequence[Choice], choose_by: str, path: Path) -> None:
    """Write a JSON file with the chosen setting and the validation scores of all settings of every label."""
    tree = {
        choice.label: {
            "chosen": choice.setting,
            choose_by: [{"setting": setting, "mean": score} for setting, score in choice.scores],
        }
        for choice in choices
    }
    write_text(path, json.dumps(tree, indent=1, ensure_ascii=False) + "\n")
