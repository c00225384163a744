"""The paper's figures and tables as one command: tune, train, compare with the paper, and judge its claims."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedadc.analysis.compare import final
from fedadc.config.build import prepare
from fedadc.errors import DataError, require
from fedadc.personal.personalize import personalize
from fedadc.runs.record import RecordedRun, is_finished, read_run
from fedadc.studies.estimate import Estimate, estimate
from fedadc.studies.judge import judge, measure, personal_rows
from fedadc.studies.paper.scales import AS_PUBLISHED, Scale
from fedadc.studies.plan import Key, PlannedRow, PlannedRun, ReproductionPlan, Setting, plan_of
from fedadc.studies.progress import Progress, RunProgress
from fedadc.studies.queue import Outcome, Watcher, train_jobs
from fedadc.studies.reproduction import PlannedCost, ReproducedRow, Reproduction, write_reproduction
from fedadc.studies.space import edges, spanned
from fedadc.system.files import folder_lock
from fedadc.system.user_code import Notes

log = logging.getLogger("fedadc")
Scores = dict[Key, list[tuple[Setting, float | None]]]  # of every setting that was tried; None: it diverged


def reproduce(
    name: str,
    *,
    scale: str | Scale = "digits",
    seeds: Sequence[int] | None = None,
    only: str | Sequence[str] = (),
    budget: float | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    data_dir: str | Path | None = None,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> Reproduction:
    """Train what a figure or table of the paper compares, put our figures beside the paper's, and judge its claims.

    `scale` is paper, laptop or digits. `only` names the methods to train. `budget` is a number of hours: what does not
    fit is not run, the least important last. `jobs` runs are trained at once in `out` (default: runs/reproduce/SCALE),
    where all figures and tables of a scale share their runs; those that are finished are not trained again. Runs that
    fail are in `failed` of the result.
    """
    plan = plan_of(name, scale, seeds, [only] if isinstance(only, str) else only)
    require(budget is None or budget > 0, f"budget must be a number of hours above 0, not {budget}.")
    data_folder = None if data_dir is None else Path(data_dir)
    _require_data(plan, data_folder)
    notes(f"{plan.design.title}; scale {plan.scale.name}: {plan.scale.summary}")
    study = _Study(plan, _folder(plan, out), data_folder, jobs, watch, notes, budget and 3600 * budget)
    with folder_lock(study.out):
        study.estimate(_calibrations(watch))
        study.train(plan.tuning_runs(study.out))
        scores = study.scores()
        chosen = plan.chosen(scores)
        study.train(plan.final_runs(study.out, chosen))
        study.calibrate()
        results = study.results()
        rows = [study.row(row, chosen.get(row.key), results.get(row.key, {})) for row in plan.rows]
        claims = [judge(claim, results, plan.scale.name == AS_PUBLISHED.name) for claim in plan.design.claims]
        failed = [outcome for _, outcome in study.outcomes if outcome.status == "failed"]
        result = Reproduction(plan, rows, claims, scores, failed, *study.seconds(), study.out)
        write_reproduction(result, results)
    return result


def dry_run(
    name: str,
    *,
    scale: str | Scale = "digits",
    seeds: Sequence[int] | None = None,
    only: str | Sequence[str] = (),
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> tuple[ReproductionPlan, list[PlannedCost]]:
    """What `reproduce` would train that is not finished yet, with an estimate of what it costs on this machine."""
    plan = plan_of(name, scale, seeds, [only] if isinstance(only, str) else only)
    study = _Study(plan, _folder(plan, out), None if data_dir is None else Path(data_dir))
    study.estimate(watch)
    costs = []
    for row in plan.rows:
        for tuning in (True, False):
            todo = [run for run in study.all_runs() if run.row == row and run.tuning == tuning]
            todo = [run for run in todo if not is_finished(run.job.path, run.job.config)]
            if todo:
                costs.append(PlannedCost(*row.key, tuning, len(todo), study.costs[row.key, tuning]))
    return plan, costs


def _folder(plan: ReproductionPlan, out: str | Path | None) -> Path:
    return Path("runs") / "reproduce" / plan.scale.name if out is None else Path(out)


def _require_data(plan: ReproductionPlan, data_dir: Path | None) -> None:
    """Check every panel with its data before anything is trained."""
    for panel in plan.design.panels:
        row = next((row for row in plan.rows if row.panel == panel), None)
        if row is not None:
            try:
                prepare(row.run(Path(), row.settings()[0], 0).job.config, data_dir)
            except DataError as error:
                raise DataError(f"{str(error).rstrip('.')}; --scale digits needs no download.") from error


@dataclass
class _Study:
    """A reproduction that is under way."""

    plan: ReproductionPlan
    out: Path
    data_dir: Path | None = None
    jobs: int | None = None
    watch: Watcher | None = None
    notes: Notes = log.info
    budget: float | None = None  # seconds
    costs: dict[tuple[Key, bool], Estimate] = field(default_factory=dict)  # of one run of a row, tuning or not
    outcomes: list[tuple[PlannedRun, Outcome]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    def all_runs(self) -> list[PlannedRun]:
        """All runs; where a setting has not been chosen yet, with the first one."""
        finished = [run for run in self.plan.tuning_runs(self.out) if is_finished(run.job.path, run.job.config)]
        chosen = self.plan.chosen(_scores((run, "finished") for run in finished))
        settings = {row.key: chosen.get(row.key, row.settings()[0]) for row in self.plan.rows}
        return self.plan.tuning_runs(self.out) + self.plan.final_runs(self.out, settings)

    def estimate(self, watch: Callable[[int, int], None] | None = None) -> None:
        """Estimate what one run of every row costs, from a short calibration."""
        one = {(run.row.key, run.tuning): run for run in self.all_runs()}
        found = estimate([run.job.config for run in one.values()], self.data_dir, watch)
        self.costs = dict(zip(one, found, strict=True))

    def train(self, runs: Sequence[PlannedRun]) -> None:
        jobs = [replace(run.job, cost=self.costs[run.row.key, run.tuning].seconds) for run in runs]
        left = None if self.budget is None else self.budget - (time.monotonic() - self._began)
        outcomes = train_jobs(
            jobs, slots=self.jobs, data_dir=self.data_dir, watch=self.watch, notes=self.notes, budget_seconds=left
        )
        self.outcomes += zip(runs, outcomes, strict=True)

    def scores(self) -> Scores:
        return _scores((run, outcome.status) for run, outcome in self.outcomes if run.tuning)

    def finished(self) -> list[PlannedRun]:
        return [run for run, outcome in self.outcomes if outcome.status == "finished" and not run.tuning]

    def calibrate(self) -> None:
        """Tune the clients' own models, where the design asks for it and it was not done before."""
        wanted = self.plan.design.regularizers
        todo = [run for run in self.finished() if not set(wanted) <= personal_rows(run.job.path).keys()]
        for number, run in enumerate(todo):
            label = f"own models, seed {run.seed}"
            watch = None if self.watch is None else _ClientCounter(self.watch, label, number, len(todo))
            personalize(run.job.path, regularizers=wanted, overwrite=True, data_dir=self.data_dir, watch=watch)

    def results(self) -> dict[Key, dict[int, RecordedRun]]:
        results: dict[Key, dict[int, RecordedRun]] = {}
        for run in self.finished():
            results.setdefault(run.row.key, {})[run.seed] = read_run(run.job.path)
        return results

    def row(self, row: PlannedRow, setting: Setting | None, runs: Mapping[int, RecordedRun]) -> ReproducedRow:
        values = {name: {seed: measure(run, name) for seed, run in runs.items()} for name in self.plan.design.measures}
        ended = [outcome.status for run, outcome in self.outcomes if run.row == row and outcome.status != "finished"]
        problems = ", ".join(dict.fromkeys(ended)) or ("" if runs else "not run")
        reported = row.panel.reported.get(row.row.label)
        at_edge = edges(spanned(row.grid), setting) if setting else []
        return ReproducedRow(*row.key, setting or {}, at_edge, len(self.plan.seeds), values, reported, problems)

    def seconds(self) -> tuple[float, float]:
        """The estimated time of the runs that were trained now, and what they took."""
        trained = [(run, outcome.seconds) for run, outcome in self.outcomes if outcome.seconds]
        expected = sum(self.costs[run.row.key, run.tuning].seconds for run, _ in trained)
        return expected, sum(seconds for _, seconds in trained)


def _calibrations(watch: Watcher | None) -> Callable[[int, int], None] | None:
    """A callback of `estimate` that reports to the watcher of a queue."""
    return None if watch is None else lambda done, total: watch(Progress(total, done, [], None, None, "calibrations"))


class _ClientCounter:
    """Turns the clients of a calibration, one by one, into the progress of several calibrations."""

    def __init__(self, watch: Watcher, label: str, number: int, total: int) -> None:
        self._watch, self._label, self._number, self._total = watch, label, number, total
        self._done, self._began = 0, time.monotonic()

    def __call__(self, run: str, clients: int) -> None:
        self._done += 1
        pace = (time.monotonic() - self._began) / self._done
        left = pace * (clients * (self._total - self._number) - self._done)
        now = RunProgress(self._label, self._done, clients, {})
        self._watch(Progress(self._total, self._number, [now], None, left))


def _scores(ended: Iterable[tuple[PlannedRun, str]]) -> Scores:
    """The validation accuracy of every setting that was tried."""
    scores: Scores = {}
    for run, status in ended:
        if status in ("finished", "diverged"):
            score = final(read_run(run.job.path), "validation_accuracy") if status == "finished" else None
            scores.setdefault(run.row.key, []).append((run.setting, score))
    return scores
