"""The paper's figures and tables as one command: tune, train, compare with the paper, and judge its claims."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedadc.analysis.compare import final
from fedadc.cluster.settings import RayCluster
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
from fedadc.system.determinism import resolve_device
from fedadc.system.files import folder_lock
from fedadc.system.processes import cores
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
    device: str = "cpu",
    engine: RayCluster | str | None = None,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> Reproduction:
    """Train what a figure or table of the paper compares, put our figures beside the paper's, and judge its claims.

    `scale` is paper, laptop or digits. `only` names the methods to train. `budget` is a number of hours: the most
    important rows are trained first, and what does not fit is not run. `jobs` runs are trained at once in `out`
    (default: runs/reproduce/SCALE), where all figures and tables of a scale share their runs; those that are finished
    are not trained again. Runs that fail are in `failed` of the result. `engine` may be a cluster (docs/cluster.md).
    """
    plan = plan_of(name, scale, seeds, [only] if isinstance(only, str) else only)
    _check_budget(budget)
    device = resolve_device(device)
    data_folder = None if data_dir is None else Path(data_dir)
    _require_data(plan, data_folder)
    deadline = math.inf if budget is None else time.monotonic() + 3600 * budget
    study = _Study(plan, _folder(plan, out), data_folder, jobs, device, engine, watch, notes, deadline)
    with folder_lock(study.out):
        notes("\n  ".join([plan.design.title, f"scale {plan.scale.name}: {plan.scale.summary}", *plan.changes()]))
        study.estimate(_calibrations(watch))
        if budget is None:
            study.train(plan.tuning_runs(study.out))
            study.train(plan.final_runs(study.out, study.chosen()))
        else:
            study.train_by_importance()
        study.calibrate()
        results = study.results()
        rows = [study.row(row, results.get(row.key, {})) for row in plan.in_order()]
        claims = [judge(claim, results, plan.scale.name == AS_PUBLISHED.name) for claim in plan.design.claims]
        failed = [outcome for _, outcome in study.outcomes if outcome.status == "failed"]
        result = Reproduction(plan, rows, claims, study.scores(), failed, *study.seconds(), study.out)
        write_reproduction(result, results)
    missing = sum(row.missing for row in rows)
    if budget is not None and missing:
        notes(
            f"{missing} runs did not fit in the budget of {budget:g} hours; without `budget`, the same command goes on"
        )
    return result


def dry_run(
    name: str,
    *,
    scale: str | Scale = "digits",
    seeds: Sequence[int] | None = None,
    only: str | Sequence[str] = (),
    budget: float | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    data_dir: str | Path | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> tuple[ReproductionPlan, list[PlannedCost]]:
    """What `reproduce` would train that is not finished yet, with an estimate of what it costs on this machine.

    With a `budget`, in hours, it also says how many of the runs are expected to fit.
    """
    _check_budget(budget)
    plan = plan_of(name, scale, seeds, [only] if isinstance(only, str) else only)
    study = _Study(plan, _folder(plan, out), None if data_dir is None else Path(data_dir), jobs)
    study.estimate(watch)
    costs, unfinished = [], study.unfinished()
    fitting = {run.job.path for run in (unfinished if budget is None else study.fitting(3600 * budget))}
    for row in plan.in_order():
        for tuning in (True, False):
            todo = [run for run in unfinished if run.row == row and run.tuning == tuning]
            if todo:
                fit = sum(run.job.path in fitting for run in todo)
                costs.append(PlannedCost(*row.key, tuning, len(todo), study.costs[row.key, tuning], fit))
    return plan, costs


def _check_budget(budget: float | None) -> None:
    require(budget is None or budget > 0, f"budget must be a number of hours above 0, not {budget}.")


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
    device: str = "cpu"
    engine: RayCluster | str | None = None
    watch: Watcher | None = None
    notes: Notes = log.info
    deadline: float = math.inf  # a time of `time.monotonic`
    costs: dict[tuple[Key, bool], Estimate] = field(default_factory=dict)  # of one run of a row, tuning or not
    outcomes: list[tuple[PlannedRun, Outcome]] = field(default_factory=list)

    def all_runs(self) -> list[PlannedRun]:
        """All runs; where a setting has not been chosen yet, with the first one."""
        finished = [run for run in self.plan.tuning_runs(self.out) if is_finished(run.job.path, run.job.config)]
        chosen = self.plan.chosen(_scores((run, "finished") for run in finished))
        settings = {row.key: chosen.get(row.key, row.settings()[0]) for row in self.plan.rows}
        return self.plan.tuning_runs(self.out) + self.plan.final_runs(self.out, settings)

    def unfinished(self) -> list[PlannedRun]:
        return [run for run in self.all_runs() if not is_finished(run.job.path, run.job.config)]

    def estimate(self, watch: Callable[[int, int], None] | None = None) -> None:
        """Estimate what one run of every row costs that has runs to train, from a short calibration."""
        one = {(run.row.key, run.tuning): run for run in self.unfinished()}
        found = estimate([run.job.config for run in one.values()], self.data_dir, watch) if one else []
        self.costs = dict(zip(one, found, strict=True))

    def cost(self, run: PlannedRun) -> float:
        """The estimated seconds of a run; 0 for one that is finished."""
        known = self.costs.get((run.row.key, run.tuning))
        return 0.0 if known is None else known.seconds

    def train(self, runs: Sequence[PlannedRun]) -> None:
        jobs = [replace(run.job, cost=self.cost(run)) for run in runs]
        outcomes = train_jobs(
            jobs, slots=self.jobs, data_dir=self.data_dir, device=self.device, engine=self.engine, watch=self.watch,
            notes=self.notes,
            deadline=self.deadline,
        )  # fmt: skip
        self.outcomes += zip(runs, outcomes, strict=True)

    def train_by_importance(self) -> None:
        """Tune and train the most important rows with the first seed, then the next ones; then all other seeds.

        The grid of a row is searched only if all of it and a run of the result are expected to fit. Finished runs are
        always in the result.
        """
        first = self.plan.seeds[0]
        for level in self._levels():
            fitting = [row for row in level if self._in_time(self._first_result(row))]
            tuning = [run for run in self.plan.tuning_runs(self.out) if run.row in level]
            self.train(_finished_or_of(fitting, tuning))
            final_runs = [run for run in self.plan.final_runs(self.out, self.chosen()) if run.row in level]
            self.train(_finished_or_of(fitting, [run for run in final_runs if run.seed == first]))
        self.train([run for run in self.plan.final_runs(self.out, self.chosen()) if run.seed != first])

    def _in_time(self, runs: Sequence[PlannedRun]) -> bool:
        return time.monotonic() + self._seconds(runs) <= self.deadline

    def fitting(self, seconds: float) -> list[PlannedRun]:
        """The unfinished runs that `train_by_importance` is expected to train in so many seconds."""
        fitting: list[PlannedRun] = []

        def add(runs: list[PlannedRun]) -> None:
            if self._seconds(fitting + runs) <= seconds:
                fitting.extend(runs)

        for level in self._levels():
            for row in level:
                add(self._first_result(row))
        untuned = {run.row.key for run in self.unfinished() if run.tuning} - {run.row.key for run in fitting}
        for run in self.unfinished():
            if not run.tuning and run.seed != self.plan.seeds[0] and run.row.key not in untuned:
                add([run])
        return fitting

    def _levels(self) -> list[list[PlannedRow]]:
        """The rows by importance, the most important first."""
        levels = sorted({row.row.importance for row in self.plan.rows})
        return [[row for row in self.plan.rows if row.row.importance == level] for level in levels]

    def _first_result(self, row: PlannedRow) -> list[PlannedRun]:
        """The unfinished runs of the grid of a row, and of its first seed."""
        return [run for run in self.unfinished() if run.row == row and (run.tuning or run.seed == self.plan.seeds[0])]

    def _seconds(self, runs: Sequence[PlannedRun]) -> float:
        """The expected time of runs, several at once."""
        return sum(self.cost(run) for run in runs) / min(self.jobs or cores(), max(1, len(runs)))

    def scores(self) -> Scores:
        return _scores((run, outcome.status) for run, outcome in self.outcomes if run.tuning)

    def chosen(self) -> dict[Key, Setting]:
        return self.plan.chosen(self.scores())

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

    def results(self) -> dict[Key, dict[int, RecordedRun | None]]:
        """The runs of every row by their seeds; None for those that diverged."""
        results: dict[Key, dict[int, RecordedRun | None]] = {}
        for run, outcome in self.outcomes:
            if not run.tuning and outcome.status in ("finished", "diverged"):
                found = read_run(run.job.path) if outcome.status == "finished" else None
                results.setdefault(run.row.key, {})[run.seed] = found
        return results

    def row(self, row: PlannedRow, runs: Mapping[int, RecordedRun | None]) -> ReproducedRow:
        setting = self.chosen().get(row.key, {})
        finished = {seed: run for seed, run in runs.items() if run is not None}
        values = {
            name: {seed: measure(run, name) for seed, run in finished.items()} for name in self.plan.design.measures
        }
        failed = [run for run, outcome in self.outcomes if run.row == row and outcome.status == "failed"]
        return ReproducedRow(
            *row.key, setting, len(row.settings()), edges(spanned(row.grid), setting, False) if setting else [],
            len(self.plan.seeds), values, row.panel.reported.get(row.row.label), len(runs) - len(finished),
            sum(not run.tuning for run in failed), sum(run.tuning for run in failed),
        )  # fmt: skip

    def seconds(self) -> tuple[float, float]:
        """The estimated time of the runs that were trained now, and what they took."""
        trained = [(run, outcome) for run, outcome in self.outcomes if outcome.seconds]
        expected = sum(self.cost(run) * outcome.rounds / run.job.config.rounds for run, outcome in trained)
        return expected, sum(outcome.seconds for _, outcome in trained)


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


def _finished_or_of(rows: Sequence[PlannedRow], runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs that are finished, and those of these rows."""
    return [run for run in runs if run.row in rows or is_finished(run.job.path, run.job.config)]


def _scores(ended: Iterable[tuple[PlannedRun, str]]) -> Scores:
    """The validation accuracy of every setting that was tried."""
    scores: Scores = {}
    for run, status in ended:
        if status in ("finished", "diverged"):
            score = final(read_run(run.job.path), "validation_accuracy") if status == "finished" else None
            scores.setdefault(run.row.key, []).append((run.setting, score))
    return scores
