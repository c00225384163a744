"""Experiments: train several methods, each with a grid of settings, and compare each at its best setting.

Every method gets the same number of settings, and every setting is trained with every seed. The setting with the best
mean over seeds on validation data is chosen. The table shows its results on test data, which are not used to choose.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fedadc.analysis.compare import AXES, final, summarize
from fedadc.analysis.comparison import Comparison
from fedadc.analysis.plots import PLOT
from fedadc.cluster.settings import RayCluster
from fedadc.config.build import prepare
from fedadc.config.schema import Schema
from fedadc.config.settings import TABLES, Config, parse_config, require_no_study
from fedadc.config.yaml import overlay, read_yaml, with_value
from fedadc.errors import (
    FedadcError,
    require,
    same_kind,
    unknown,
)
from fedadc.evaluation.stopping import higher_is_better
from fedadc.fields.settings import Settings
from fedadc.runs.record import RecordedRun, read_run
from fedadc.studies.choosing import require_measured
from fedadc.studies.queue import Job, Watcher, finished, require_none_failed, train_jobs
from fedadc.studies.space import edges, spanned
from fedadc.system.files import checksum, folder_lock, write_text
from fedadc.system.user_code import Notes, UserCode

log = logging.getLogger("fedadc")
CHOICES = "choices.json"  # in the folder of an experiment


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
    budget: int | None = None  # number of settings per label, the same for all
    equal_budgets: bool = True  # False: grids may have different sizes, and the table says so
    choose_by: str = "validation_accuracy"
    target: float | None = None  # the accuracy to reach; the table shows how long it took
    x: str = "round"  # the measure of progress, as in `fedadc compare --x`

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.seeds), "seeds must name at least one seed.")
        require(len(set(self.seeds)) == len(self.seeds), f"seeds must not name a seed twice: {self.seeds}.")
        require(bool(self.runs), "runs must name at least one method.")
        require(
            self.budget is not None or not self.equal_budgets,
            "budget is missing; write how many settings every run may try, e.g. budget: 12, or equal_budgets: false.",
        )
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
        score = "r2" if self.base.get("task") == "regression" else "accuracy"
        return f"personal_{score}" if self.choose_by.startswith("validation_personal_") else f"test_{score}"


@dataclass(frozen=True)
class Trial:
    """One run of the experiment: one setting of one label with one seed."""

    label: str
    number: int  # the setting's position in the grid, from 1
    setting: dict[str, Any]  # key.sub -> value
    config: Config
    folder: str

    def job(self, out: Path) -> Job:
        return Job(self.label, self.config, out / self.folder)


@dataclass(frozen=True)
class Choice:
    """The setting that was chosen for a label, and the scores of all its settings."""

    label: str
    setting: dict[str, Any]
    scores: list[tuple[dict[str, Any], float | None]]  # (setting, score); None: training diverged
    runs: list[RecordedRun]  # of the chosen setting; empty if all settings diverged
    edges: list[str] = field(default_factory=list)  # sentences on values that stand at the edge of the grid

    def described(self) -> str:
        """The chosen setting as text."""
        return ", ".join(f"{key} {value}" for key, value in self.setting.items()) or (
            "as given" if self.runs else "all diverged"
        )


@dataclass(frozen=True)
class ExperimentResult:
    """What `experiment` returns: the runs of the best settings side by side, and how these were chosen."""

    comparison: Comparison | None  # None: every setting diverged
    choices: list[Choice]
    choose_by: str
    out: Path

    def __repr__(self) -> str:
        best = "\n".join(f"  {choice.label}: {choice.described()}" for choice in self.choices)
        return f"ExperimentResult({self.out}), best settings by {self.choose_by}:\n{best}"


def experiment(
    file: str | Path,
    *,
    out: str | Path | None = None,
    jobs: int | None = None,
    data_dir: str | Path | None = None,
    engine: RayCluster | str | None = None,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> ExperimentResult:
    """Train several methods, each with a grid of settings, and compare them at their best. Finished runs are kept.

    `jobs` runs are trained at once (default: one per core) in the folder `out` (default: runs/FILE). `watch` is called
    with the progress of all runs, several times a second. With `engine`, a Ray cluster trains them (docs/cluster.md).
    """
    plan, trials = read_experiment(Path(file), notes)
    data_folder = None if data_dir is None else Path(data_dir)
    check_rows(trials, data_folder)
    folder = Path("runs") / Path(file).stem if out is None else Path(out)
    with folder_lock(folder):
        diverged = train_trials(trials, folder, jobs, data_folder, engine, watch, notes)
        choices = choose(plan, trials, folder, diverged)
        write_choices(choices, plan.choose_by, folder / CHOICES)
        runs = [run for choice in choices for run in choice.runs]
        if not runs:
            return ExperimentResult(None, choices, plan.choose_by, folder)
        rows = summarize(runs, plan.target, plan.metric, plan.x)
        result = Comparison(rows, runs, plan.metric, plan.x, plan.title)
        result.plot(folder / PLOT)
    return ExperimentResult(result, choices, plan.choose_by, folder)


def train_trials(
    trials: Sequence[Trial],
    out: Path,
    jobs: int | None = None,
    data_dir: Path | None = None,
    engine: RayCluster | str | None = None,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> set[str]:
    """Train the runs of an experiment that are not finished; returns the folders of those that diverged."""
    queue = [trial.job(out) for trial in trials]
    if kept := len(finished(queue)):
        kept_runs = f"{kept} of {len(queue)} runs in {out} are already finished and are kept"
        notes(f"{kept_runs}; if your data or code has changed since, choose another folder")
    outcomes = train_jobs(queue, slots=jobs, data_dir=data_dir, engine=engine, watch=watch, notes=notes)
    require_none_failed(outcomes)
    return {t.folder for t, outcome in zip(trials, outcomes, strict=True) if outcome.status == "diverged"}


def read_experiment(path: Path, notes: Notes = log.info) -> tuple[Experiment, list[Trial]]:
    """The experiment in a file and all its trials, whose configs are checked."""
    schema, tree = Schema(TABLES, UserCode(path.resolve().parent, notes)), read_yaml(path)
    require_no_study(tree, str(path), "sweep")
    require("rounds" not in tree, f"{path} is the config of one run; train it with `fedadc run {path}`.")
    experiment = schema.build(Experiment, tree)
    trials = list(_trials(experiment, schema))
    for trial in trials:
        require_measured(trial.config, experiment.choose_by, f"runs.{trial.label}")
    return experiment, trials


def _trials(experiment: Experiment, schema: Schema) -> Iterator[Trial]:
    """Every setting of every label with every seed."""
    folders: dict[str, str] = {}
    for label, tree in experiment.runs.items():
        candidate = schema.build(Candidate, tree or {}, f"runs.{label}")
        grid = [[(key, value) for value in values] for key, values in candidate.grid.items()]
        points = list(product(*grid))
        require(
            not experiment.equal_budgets or len(points) == experiment.budget,
            f"runs.{label}.grid has {len(points)} settings, but the budget is {experiment.budget} for every run; "
            "change its grid, or write equal_budgets: false to compare runs that are not tuned alike.",
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
                name = setting_hash(config)
                yield Trial(label, number, dict(point), config, f"{slug}/{name}-seed{seed}")
            require(name not in hashes, f"runs.{label}.grid has the setting {dict(point)} twice.")
            hashes.add(name)


# Settings that came after 0.3, with their defaults. They do not count in a hash, so folders keep their names.
LATER_SETTINGS: dict[tuple[str, str], Any] = {
    ("evaluate", "drift"): False,
    ("evaluate", "last"): 1,
    ("stop", "patience"): None,
    ("stop", "min_delta"): 0.0,
    ("stop", "metric"): None,
    ("checkpoint", "best"): None,
    ("local", "optimizer"): {"name": "sgd"},
}


def setting_hash(config: Config) -> str:
    """A short hash of a config and its user code, without its seed.

    It names folders, so a changed experiment never reuses old runs.
    """
    tree = {key: value for key, value in config.tree().items() if key != "seed"}
    for (node, key), default in LATER_SETTINGS.items():
        if tree[node].get(key) == default:
            tree[node] = {k: v for k, v in tree[node].items() if k != key}
    text = json.dumps(tree, sort_keys=True, default=str)
    files = [config.folder / f"{module}.py" for module in sorted(set(re.findall(r'"(\w+):\w+"', text)))]
    code = [checksum(file.read_bytes()) for file in files if file.is_file()]
    return hashlib.blake2b("".join([text, *code]).encode(), digest_size=4).hexdigest()


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
        setting = best[0].setting if best else {}
        grid = {key: [s[key] for s, _ in all_scores] for key in setting}
        choices.append(Choice(label, setting, all_scores, runs, edges(spanned(grid), setting)))
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
