"""Sweeps: try many settings of one config, and choose the best by validation data.

Trials are asked for and trained in batches. A batch trains to the first rung, then its trials are reported and pruned
in their order, the others go on to the next rung, and so on. So what is tried, pruned and chosen depends on the
settings of the sweep alone: not on how many runs are trained at once, on which ends first, or on interruptions.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedadc.analysis.compare import final
from fedadc.analysis.heatmap import HEATMAP, draw_heat_map
from fedadc.cluster.settings import RayCluster
from fedadc.config.settings import Config
from fedadc.errors import require
from fedadc.evaluation.stopping import higher_is_better
from fedadc.runs.record import RecordedRun, read_run
from fedadc.studies.choosing import test_metric
from fedadc.studies.progress import Progress
from fedadc.studies.queue import Job, Watcher, require_none_failed, train_jobs
from fedadc.studies.search import EVALUATOR, importance, pruned_at, suggest
from fedadc.studies.space import described, edges
from fedadc.studies.sweep_map import map_of_trials
from fedadc.studies.sweep_plan import SweepPlan, check_with_data, claim_folder, read_sweep
from fedadc.studies.trial_file import SweepTrial, read_trials, write_trials
from fedadc.system.files import folder_lock, write_text
from fedadc.system.user_code import Notes

log = logging.getLogger("fedadc")
CHOICE = "choice.json"  # in the folder of a sweep


@dataclass(frozen=True)
class SweepResult:
    """What `sweep` returns: all trials, and the best by validation data."""

    trials: list[SweepTrial]
    best: SweepTrial | None  # None: every trial diverged
    choose_by: str
    test_metric: str  # recorded beside; never used to choose
    edges: list[str]  # sentences on values of the best that stand at the edge of their grid or range
    importance: dict[str, float]  # key -> share; the most important first
    no_importance: str  # the reason if it is not known
    out: Path
    title: str | None = None

    def __repr__(self) -> str:
        best = "every trial diverged" if self.best is None else described(self.best.settings)
        score = "" if self.best is None else f", {self.choose_by} {self.best.score:.4f}"
        return f"SweepResult({self.out}), best of {len(self.trials)} trials:\n  {best}{score}"

    def ranked(self) -> list[SweepTrial]:
        """The best first; then the pruned ones, those first that came farther; then those that diverged."""
        sign = 1 if higher_is_better(self.choose_by) else -1
        order = ("finished", "pruned", "diverged")

        def rank(trial: SweepTrial) -> tuple[int, int, float]:
            last = list(trial.rungs.values())[-1:] if trial.score is None else [trial.score]
            return order.index(trial.state), -len(trial.rungs) * (trial.score is None), -sign * sum(last)

        return sorted(self.trials, key=rank)

    def as_dict(self) -> dict[str, Any]:
        """The choice as plain values."""
        best = None
        if self.best is not None:
            best = {"trial": self.best.trial, "settings": self.best.settings, "score": self.best.score}
            best |= {"values": self.best.values}
        states = [trial.state for trial in self.trials]
        return {
            "chosen": best,
            "choose_by": self.choose_by,
            "trials": {state: states.count(state) for state in ("finished", "pruned", "diverged")},
            "edges": self.edges,
            "importance": {"evaluator": EVALUATOR, **({"shares": self.importance} if self.importance else {}),
                           **({"reason": self.no_importance} if self.no_importance else {})},
        }  # fmt: skip


def sweep(
    source: Config | Mapping[str, Any] | str | Path,
    search: Mapping[str, Any] | None = None,
    *,
    sampler: str | None = None,
    pruner: str | None = None,
    trials: int | None = None,
    batch: int | None = None,
    rungs: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    seed: int | None = None,
    choose_by: str | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    data_dir: str | Path | None = None,
    engine: RayCluster | str | None = None,
    trust: bool = False,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> SweepResult:
    """Try many settings of a config, and choose the best by validation data. A sweep that was stopped goes on.

    `source` is the file of a sweep, or a config; then `search` has the keys to sweep, each with a list of values or a
    range such as "0.001..1,log" or "1..16,int". Other arguments replace settings of the file (docs/sweeps.md).
    `jobs` runs are trained at once (default: one per core) in the folder `out` (default: runs/NAME-sweep). With
    `engine`, a Ray cluster trains them (docs/cluster.md).
    """
    given = {
        "sampler": sampler, "pruner": pruner, "trials": trials, "batch": batch, "seed": seed, "choose_by": choose_by,
        "rungs": None if rungs is None else list(rungs), "seeds": None if seeds is None else list(seeds),
    }  # fmt: skip
    plan = read_sweep(source, search or {}, {k: v for k, v in given.items() if v is not None}, notes, trust)
    data_folder = None if data_dir is None else Path(data_dir)
    check_with_data(plan, data_folder)
    folder = _default_folder(source) if out is None else Path(out)
    require(not folder.exists() or folder.is_dir(), f"{folder} is not a folder; choose another `out`.")
    with folder_lock(folder):
        claim_folder(folder, plan, notes)
        searching = _Search(plan, folder, jobs, data_folder, engine, watch, notes)
        result = _result(plan, searching.run(), folder)
        write_text(folder / CHOICE, json.dumps(result.as_dict(), indent=1, ensure_ascii=False) + "\n")
        _draw(plan, result)
    return result


def _default_folder(source: Any) -> Path:
    name = Path(source).stem if isinstance(source, str | Path) else "config"
    return Path("runs") / (name if name.startswith("sweep") else f"{name}-sweep")


class _Search:
    """The loop over batches. Trials are written to the file after every step, so a stopped sweep goes on from there."""

    def __init__(
        self,
        plan: SweepPlan,
        folder: Path,
        jobs: int | None,
        data_dir: Path | None,
        engine: RayCluster | str | None,
        watch: Watcher | None,
        notes: Notes,
    ) -> None:
        self.plan, self.folder, self.jobs, self.data_dir = plan, folder, jobs, data_dir
        self.engine, self.watch, self.notes = engine, watch, notes
        self.first_of: dict[str, int] = {}  # settings -> the first trial that has them
        self._know(read_trials(folder, plan.space))
        self.runs_before = self._runs_ended()
        self.began = time.monotonic()
        if self.runs_before:
            notes(f"{folder}: {self.runs_before // len(plan.sweep.seeds)} of {plan.trials} trials are kept")

    def run(self) -> list[SweepTrial]:
        while True:
            if not self._running():
                if len(self.trials) >= self.plan.trials:
                    return self.trials
                self._save(self.trials + self._next_batch())
            for rung in self.plan.rungs:
                self._train_to_rung(rung)
            self._train_to_end()

    def _next_batch(self) -> list[SweepTrial]:
        plan, begun = self.plan, len(self.trials)
        count = min(plan.batch, plan.trials - begun)
        if plan.points:
            points = plan.points[begun : begun + count]
        else:
            sampler = str(plan.sweep.sampler)
            points = suggest(plan.space, self.trials, count, sampler, plan.sweep.seed, plan.maximize)
        return [SweepTrial(trial=begun + i, settings=point) for i, point in enumerate(points)]

    def _train_to_rung(self, rung: int) -> None:
        """Train the trials of a batch to a round, then let the pruner decide, in the order of trials."""
        plan = self.plan
        todo = [t for t in self._running() if str(rung) not in t.rungs and rung < t.settings.get("rounds", plan.rounds)]
        if not todo:
            return
        diverged = self._train(todo, rung)
        reached = {t.trial: None if t.trial in diverged else self._at_rung(t, rung) for t in todo}
        values = {number: value for number, value in reached.items() if value is not None}
        bad = reached.keys() - values.keys()
        trials = [replace(t, state="diverged") if t.trial in bad else t for t in self.trials]
        self._save(
            pruned_at(rung, values, plan.space, trials, plan.sweep.pruner, plan.rungs, plan.rounds, plan.maximize)
        )

    def _train_to_end(self) -> None:
        todo = self._running()
        diverged = self._train(todo, None)
        ended = {t.trial: replace(t, state="diverged") if t.trial in diverged else self._scored(t) for t in todo}
        self._save([ended.get(t.trial, t) for t in self.trials])

    def _train(self, trials: Sequence[SweepTrial], until: int | None) -> set[int]:
        """Train the runs of these trials; returns the numbers of those that diverged."""
        jobs = {job.path: job for trial in trials for job in self._jobs(trial, until)}
        ended = self._runs_ended()

        def watch(progress: Progress) -> None:
            if self.watch is not None:
                self.watch(self._over_all(progress, ended, until is None))

        outcomes = train_jobs(
            list(jobs.values()),
            slots=self.jobs,
            data_dir=self.data_dir,
            engine=self.engine,
            watch=watch,
            notes=self.notes,
        )
        require_none_failed(outcomes)
        bad = {outcome.job.path for outcome in outcomes if outcome.status == "diverged"}
        return {trial.trial for trial in trials if bad & set(self._paths(trial))}

    def _over_all(self, progress: Progress, ended: int, to_end: bool) -> Progress:
        """The progress of a batch as that of the sweep. The time that is left is that of trials that are not pruned."""
        whole = replace(
            progress, runs=self.plan.trials * len(self.plan.sweep.seeds), ended=ended + to_end * progress.ended
        )
        trained = whole.share - self.runs_before
        pace = (time.monotonic() - self.began) / trained if trained > 0 and progress.seconds_left is not None else None
        return replace(whole, seconds_left=None if pace is None else pace * (whole.runs - whole.share))

    def _jobs(self, trial: SweepTrial, until: int | None) -> Iterator[Job]:
        """The runs of a trial: one for each seed."""
        seeds = self.plan.sweep.seeds
        for seed, path in zip(seeds, self._paths(trial), strict=True):
            label = f"trial {trial.trial}" + f", seed {seed}" * (len(seeds) > 1)
            yield Job(label, self.plan.config(trial.settings, seed), path, until)

    def _paths(self, trial: SweepTrial) -> list[Path]:
        """The run directories of a trial. Trials of equal settings share them."""
        first = self.first_of[json.dumps(trial.settings)]
        return [self.folder / f"trial-{first:04d}" / f"seed{seed}" for seed in self.plan.sweep.seeds]

    def _read(self, trial: SweepTrial) -> list[RecordedRun]:
        return [read_run(path) for path in self._paths(trial)]

    def _at_rung(self, trial: SweepTrial, rung: int) -> float | None:
        """The mean over seeds of the last evaluated value; a run may be farther if its settings were tried before.

        None: no value is finite, e.g. if the loss overflows while the model does not. That counts as divergence.
        """
        metric, runs = self.plan.sweep.choose_by, self._read(trial)
        values = [
            [v for r in run.records if r["round"] <= rung and (v := _number(r, metric)) is not None] for run in runs
        ]
        return statistics.mean(reached[-1] for reached in values) if all(values) else None

    def _scored(self, trial: SweepTrial) -> SweepTrial:
        choose_by, runs = self.plan.sweep.choose_by, self._read(trial)
        values = {
            metric: [final(run, metric) for run in runs]
            for metric in (choose_by, test_metric(choose_by))
            if all(any(_number(record, metric) is not None for record in run.records) for run in runs)
        }
        if choose_by not in values:
            return replace(trial, state="diverged")
        return replace(trial, state="finished", score=statistics.mean(values[choose_by]), values=values)

    def _running(self) -> list[SweepTrial]:
        return [t for t in self.trials if t.state == "running"]

    def _runs_ended(self) -> int:
        return len(self.plan.sweep.seeds) * sum(t.state != "running" for t in self.trials)

    def _save(self, trials: list[SweepTrial]) -> None:
        write_trials(self.folder, trials)
        self._know(trials)

    def _know(self, trials: list[SweepTrial]) -> None:
        self.trials = trials
        for trial in trials:
            self.first_of.setdefault(json.dumps(trial.settings), trial.trial)


def _number(record: Mapping[str, Any], metric: str) -> float | None:
    value = record.get(metric)
    return float(value) if isinstance(value, int | float) else None


def _result(plan: SweepPlan, trials: list[SweepTrial], folder: Path) -> SweepResult:
    """Choose the best trial, of equal ones the first, by validation data."""
    sign = 1 if plan.maximize else -1
    finished = [t for t in trials if t.score is not None]
    best = max(finished, key=lambda t: sign * (t.score or 0.0)) if finished else None
    shares, reason = importance(plan.space, trials, plan.sweep.seed, plan.maximize)
    return SweepResult(
        trials=trials,
        best=best,
        choose_by=plan.sweep.choose_by,
        test_metric=test_metric(plan.sweep.choose_by),
        edges=[] if best is None else edges(plan.space, best.settings),
        importance=shares,
        no_importance=reason,
        out=folder,
        title=plan.sweep.title,
    )


def _draw(plan: SweepPlan, result: SweepResult) -> None:
    if result.best is None:
        return
    shown = map_of_trials(
        plan.space, result.trials, result.best, list(result.importance), result.choose_by, plan.maximize, result.title
    )
    if shown is not None:
        draw_heat_map(shown, result.out / HEATMAP)
