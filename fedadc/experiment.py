"""An experiment file: several methods, each with a grid of settings, every setting with every seed.

Each method gets the same number of settings. The one with the best mean over seeds on validation data is its own; the
table shows the test figures of that one, which took no part in the choice.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fedadc.config import TABLES, Config, load_config
from fedadc.errors import FedadcError, one_line, require
from fedadc.evaluate import reaches
from fedadc.record import RecordedRun, read_run, write_text
from fedadc.report import final, higher_is_better
from fedadc.schema import Schema
from fedadc.tree import changed, overlay, read_yaml


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One row of the table: what differs from `base`, and the settings to choose from."""

    set: dict[str, Any] = field(default_factory=dict)  # laid over `base`
    grid: dict[str, list[Any]] = field(default_factory=dict)  # key.sub -> values; all combinations


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What an experiment file says."""

    title: str
    base: dict[str, Any]  # a config without method and seed
    runs: dict[str, Any]  # label -> candidate
    seeds: list[int]
    budget: int  # settings per label, the same for all
    choose_by: str = "validation_accuracy"
    target: float | None = None  # the accuracy whose first round is told

    def __post_init__(self) -> None:
        require(bool(self.seeds), "seeds must name at least one seed.")
        require(len(set(self.seeds)) == len(self.seeds), f"seeds name one twice: {self.seeds}.")
        require(bool(self.runs), "runs must name at least one method.")
        require(
            not self.choose_by.startswith("test"),
            f"choose_by is {self.choose_by}, but settings are never chosen on test data; name a validation metric.",
        )


@dataclass(frozen=True)
class Trial:
    """One setting of one label with one seed."""

    label: str
    number: int  # of the setting
    setting: dict[str, Any]  # of the grid
    config: Config
    folder: str


@dataclass(frozen=True)
class Choice:
    """What was chosen for a label, and by what figures."""

    label: str
    setting: dict[str, Any]
    scores: list[tuple[dict[str, Any], float | None]]  # of all settings; None: training failed
    runs: list[RecordedRun]

    def described(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.setting.items())


def read_experiment(path: Path) -> tuple[Experiment, list[Trial]]:
    """The experiment of a file and all its trials; every config in it is checked."""
    schema = Schema(TABLES, path.resolve().parent)
    experiment = schema.build(Experiment, read_yaml(path))
    return experiment, list(_trials(experiment, schema))


def _trials(experiment: Experiment, schema: Schema) -> Iterator[Trial]:
    folders: dict[str, str] = {}
    for label, tree in experiment.runs.items():
        candidate = schema.build(Candidate, tree or {}, f"runs.{label}")
        grid = [[(key, value) for value in values] for key, values in candidate.grid.items()]
        points = list(product(*grid))
        require(
            len(points) == experiment.budget,
            f"runs.{label}.grid has {len(points)} settings, but the budget is {experiment.budget} for every one.",
        )
        slug = re.sub(r"[^a-z0-9+]+", "-", label.lower()).strip("-")
        other = folders.setdefault(slug, label)
        require(other == label, f"runs {other!r} and {label!r} would share the folder {slug!r}; rename one of them.")
        marks = set()
        for number, point in enumerate(points, start=1):
            tree = overlay(experiment.base, candidate.set)
            for key, value in point:
                tree = changed(tree, key, value)
            for seed in experiment.seeds:
                config = load_config({**tree, "seed": seed, "label": label}, folder=schema.folder)
                require(
                    config.data.validation is not None or not experiment.choose_by.startswith("validation"),
                    f"runs.{label} has no validation data, on which settings could be chosen; set data.validation.",
                )
                mark = _mark(config)
                yield Trial(label, number, dict(point), config, f"{slug}/{number:02d}-{mark}-seed{seed}")
            require(mark not in marks, f"runs.{label}.grid has the setting {dict(point)} twice.")
            marks.add(mark)


def _mark(config: Config) -> str:
    """Short for a config but its seed, so that a changed file never takes old runs for its own."""
    tree = {key: value for key, value in config.tree().items() if key != "seed"}
    return hashlib.blake2b(json.dumps(tree, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()


def run_trials(
    trials: Sequence[Trial], out: Path, jobs: int, data_dir: Path | None, watch: Callable[[str, dict[str, Any]], None]
) -> dict[str, str]:
    """Train what is not there yet, several at once; returns what failed, folder -> reason."""
    todo = [trial for trial in trials if not _finished(out / trial.folder, trial.config)]
    for trial in trials:
        if trial not in todo:
            watch(trial.label, {})
    failed: dict[str, str] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_leave_with_the_parent) as pool:
        running = {pool.submit(_train, t.config.tree(), t.config.folder, out / t.folder, data_dir): t for t in todo}
        try:
            for done in as_completed(running):
                trial = running[done]
                record, reason = done.result()
                if reason is not None:
                    failed[trial.folder] = reason
                watch(trial.label, record)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def _leave_with_the_parent() -> None:
    """A process of the pool would wait for ever for work from a parent that was killed."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _train(
    tree: Mapping[str, Any], folder: Path, out: Path, data_dir: Path | None
) -> tuple[dict[str, Any], str | None]:
    """In a process of its own: the last record, or why there is none."""
    from fedadc.runner import run

    try:
        config = load_config(tree, folder=folder)
        return run(config, out=out, overwrite=True, data_dir=data_dir, notes=lambda _: None).history[-1], None
    except FedadcError as error:
        return {}, str(error)
    except Exception as error:  # a bug in a user's own method must not end the others' runs
        return {}, f"{type(error).__name__}: {one_line(error)}"


def _finished(path: Path, config: Config) -> bool:
    try:
        last = read_run(path).records[-1]
    except FedadcError:
        return False
    return bool(last["round"] == config.rounds or reaches(last, config.stop.accuracy))


def choose(experiment: Experiment, trials: Sequence[Trial], out: Path, failed: Mapping[str, str]) -> list[Choice]:
    """The best setting of every label, by the mean over seeds on validation data; the first of equals."""
    choices = []
    sign = 1 if higher_is_better(experiment.choose_by) else -1
    for label in experiment.runs:
        settings: dict[int, list[Trial]] = {}
        for trial in trials:
            if trial.label == label:
                settings.setdefault(trial.number, []).append(trial)
        scores: dict[int, float] = {}
        for number, members in settings.items():
            if not any(t.folder in failed for t in members):
                scores[number] = statistics.mean(final(read_run(out / t.folder), experiment.choose_by) for t in members)
        reasons = [failed[t.folder] for members in settings.values() for t in members if t.folder in failed]
        require(bool(scores), f"{label}: no setting could be trained: {reasons[0] if reasons else ''}")
        best = settings[max(scores, key=lambda number: sign * scores[number])]
        figures = [(members[0].setting, scores.get(number)) for number, members in settings.items()]
        choices.append(Choice(label, best[0].setting, figures, [read_run(out / t.folder) for t in best]))
    return choices


def write_choices(choices: Sequence[Choice], choose_by: str, path: Path) -> None:
    """All settings with their validation figures, the chosen ones marked."""
    tree = {
        choice.label: {
            "chosen": choice.setting,
            choose_by: [{"setting": setting, "mean": score} for setting, score in choice.scores],
        }
        for choice in choices
    }
    write_text(path, json.dumps(tree, indent=1, ensure_ascii=False) + "\n")
