"""Train many runs, several at once, each in a process of its own.

A finished run is kept, an interrupted one is resumed. A run that fails does not stop the others. A process that is
killed is started again. A signal ends all processes within seconds; each saves its run first.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from fedadc.cluster.settings import RayCluster, cluster_of
from fedadc.config.settings import Config
from fedadc.engines.pool import CANNOT_START, require_may_start_processes
from fedadc.errors import Diverged, FedadcError, WorkersLost, one_line, require
from fedadc.runs.fingerprint import require_same_settings
from fedadc.runs.record import is_finished, read_run, recorded_config
from fedadc.studies.places import Places, RunProcess, ThisMachine
from fedadc.studies.progress import PaceLearner, Progress, RunProgress, remaining
from fedadc.studies.run_process import INTERVAL, PATIENCE, STARTED, RunDone, RunFailure, RunRequest
from fedadc.system.determinism import resolve_device
from fedadc.system.signals import KILL, deferred_signals, stopping_on_signals
from fedadc.system.user_code import Notes

log = logging.getLogger("fedadc")
ATTEMPTS = 3  # to train a run whose process is killed
LONG_RUN = 60.0  # estimated seconds of a run whose clients may be trained in parallel, if there are few runs

Watcher = Callable[[Progress], None]
Status = Literal["finished", "diverged", "failed", "not run"]


@dataclass(frozen=True)
class Job:
    """A run to train, and where."""

    label: str
    config: Config
    path: Path  # its run directory
    until: int | None = None  # pause after this round; a later job with a larger one resumes the run
    cost: float = 0.0  # estimated seconds, or any measure of its work; 0: its rounds

    @property
    def last(self) -> int:
        """The last round to train."""
        return self.config.rounds if self.until is None else min(self.until, self.config.rounds)


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: Job
    status: Status
    message: str = ""  # why it failed
    exit_code: int = 0
    trace: str = ""  # of a bug
    seconds: float = 0.0  # of its process, now; 0 for a run that was finished before
    rounds: int = 0  # that were trained now


class RunsFailed(FedadcError):
    """Some runs failed. The exit code is that of the first, in the order of the jobs."""

    def __init__(self, failed: Sequence[Outcome]) -> None:
        self.sentences = [str(FedadcError(f"{outcome.job.path}: {outcome.message}")) for outcome in failed]
        self.trace = next((outcome.trace for outcome in failed if outcome.trace), "")
        self.exit_code = failed[0].exit_code
        super().__init__(" ".join(self.sentences))


def require_none_failed(outcomes: Sequence[Outcome]) -> None:
    """Report the runs that failed. Divergence is no failure: it is a result like any other."""
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        raise RunsFailed(failed)


def train_jobs(
    jobs: Sequence[Job],
    *,
    slots: int | None = None,
    data_dir: Path | None = None,
    device: str = "cpu",
    engine: RayCluster | str | None = None,
    watch: Watcher | None = None,
    notes: Notes = log.info,
    deadline: float = math.inf,
) -> list[Outcome]:
    """Train these runs, `slots` at once; returns how each ended, in the order of the jobs.

    By default, one run per core is trained at once, or one per GPU; with `engine`, those of a cluster count.
    `deadline` is a time of `time.monotonic`: a run starts only if it is expected to end before it. The others are not
    run.
    """
    require(len({job.path for job in jobs}) == len(jobs), "two jobs have the same run directory.")
    outcomes = {job.path: outcome for job in jobs if (outcome := _outcome_before(job)) is not None}
    todo = [job for job in jobs if job.path not in outcomes]
    if todo:
        require_may_start_processes()
        device = resolve_device(device)
        with closing(_places(cluster_of(engine), device, [job.path for job in todo], data_dir, notes)) as places:
            queue = _Queue(todo, places, slots, data_dir, watch, notes, deadline)
            outcomes |= {outcome.job.path: outcome for outcome in queue.train()}
    return [outcomes[job.path] for job in jobs]


def _places(
    cluster: RayCluster | None, device: str, paths: Sequence[Path], data_dir: Path | None, notes: Notes
) -> Places:
    """Where the runs are trained."""
    if cluster is None:
        return ThisMachine(device)
    from fedadc.studies.cluster_places import ClusterNodes

    return ClusterNodes(cluster, device, Path(os.path.commonpath([p.resolve().parent for p in paths])), data_dir, notes)


def finished(jobs: Sequence[Job]) -> list[Job]:
    """The jobs whose runs are finished."""
    return [job for job in jobs if is_finished(job.path, job.config)]


def _outcome_before(job: Job) -> Outcome | None:
    """The outcome of a job that needs no training: its run is done, or is a run of other settings."""
    if not _is_done(job):
        return None
    try:
        recorded = recorded_config(job.path, given=job.config.classes())
        require_same_settings(recorded, job.config, str(job.path), complete=False)
    except FedadcError as error:
        return Outcome(job, "failed", str(error), error.exit_code)
    return Outcome(job, "finished")


def _is_done(job: Job) -> bool:
    paused = job.last < job.config.rounds and rounds_done(job.path) >= job.last
    return paused or is_finished(job.path, job.config)


def rounds_done(path: Path) -> int:
    """The rounds that the run in a directory has recorded; 0 if there is none."""
    try:
        return int(read_run(path).records[-1]["round"])
    except FedadcError:
        return 0


@dataclass
class _Attempt:
    """A process that trains a run."""

    job: Job
    number: int  # from 1
    process: RunProcess
    began: float
    first: int = 0  # the first round that was trained; 0: none yet
    record: dict[str, Any] = field(default_factory=dict)  # of the last round
    started: bool = False  # the process has loaded the package
    outcome: Outcome | None = None

    @property
    def round(self) -> int:
        return int(self.record.get("round", 0))

    @property
    def units_done(self) -> float:
        """Units of work that this attempt has done."""
        return _units(self.job, self.round - self.first + 1) if self.first else 0.0

    @property
    def units_left(self) -> float:
        return _units(self.job, self.job.last - self.round)


def _units(job: Job, rounds: int) -> float:
    return (job.cost or job.config.rounds) * rounds / job.config.rounds


class _Queue:
    def __init__(
        self,
        jobs: Sequence[Job],
        places: Places,
        slots: int | None,
        data_dir: Path | None,
        watch: Watcher | None,
        notes: Notes,
        deadline: float,
    ) -> None:
        self.jobs, self.places, self._asked, self.data_dir = jobs, places, slots, data_dir
        self.watch, self.notes, self.deadline = watch, notes, deadline
        self.outcomes: list[Outcome] = []
        self._waiting = deque((job, 1) for job in jobs)  # with the number of the attempt
        self._running: list[_Attempt] = []
        self._pace = PaceLearner()
        self._before = {job.path: rounds_done(job.path) for job in jobs}  # of runs that are resumed
        self._last: tuple[str, dict[str, Any]] | None = None

    @property
    def slots(self) -> int:
        """Runs that are trained at once; nodes of a cluster may join."""
        return self._asked or max(1, self.places.room)

    def train(self) -> list[Outcome]:
        with stopping_on_signals():
            try:
                self._show()
                while self._waiting or self._running:
                    self._start()
                    self._receive()
                    self._show()
            except KeyboardInterrupt:
                self._stop()
                with suppress(OSError):  # the terminal may be closed
                    self.notes("finished runs are kept and others are saved; give the same command again to continue")
                raise
            finally:
                self._stop()
        return self.outcomes

    def _start(self) -> None:
        """Start processes for the next runs, as long as there is room."""
        while self._waiting and len(self._running) < self.slots:
            job, number = self._waiting.popleft()
            if not self._fits(job):
                self.outcomes.append(Outcome(job, "not run", "it would end too late"))
                continue
            try:
                with deferred_signals():
                    self._running.append(self._attempt(job, number))
            except (OSError, EOFError) as error:  # no more processes, or a process server that is dying
                time.sleep(INTERVAL)
                self._try_again(job, number, f"its process cannot be started ({one_line(error)})")

    def _fits(self, job: Job) -> bool:
        if self.deadline == math.inf:
            return True
        rest = job.last - self._before[job.path]
        expected = self._pace.seconds(job.label, _units(job, rest))
        seconds = job.cost * rest / job.config.rounds if expected is None else expected
        return time.monotonic() + seconds <= self.deadline

    def _attempt(self, job: Job, number: int) -> _Attempt:
        at_once = min(self.slots, len(self._waiting) + len(self._running) + 1)
        request = RunRequest(
            job.config.tree(), job.config.folder, job.path, job.until, self.data_dir, self.places.device
        )
        process = self.places.start(request, at_once, is_long=job.cost >= LONG_RUN)
        return _Attempt(job, number, process, time.monotonic())

    def _receive(self) -> None:
        """Wait a moment for messages and ends of processes."""
        for ready in wait([attempt.process.pipe for attempt in self._running], INTERVAL):
            attempt = next(a for a in self._running if a.process.pipe is ready)
            try:
                self._accept(attempt, attempt.process.pipe.recv())
                over = attempt.outcome is not None
            except (EOFError, OSError):
                over = True
            if over:
                self._ended(attempt)

    def _accept(self, attempt: _Attempt, message: Any) -> None:
        attempt.started = True
        if isinstance(message, RunFailure):
            status: Status = "diverged" if message.exit_code == Diverged.exit_code else "failed"
            attempt.outcome = Outcome(attempt.job, status, message.text, message.exit_code, message.trace)
        elif isinstance(message, RunDone):
            attempt.first = attempt.first or message.record["round"]
            attempt.record = message.record
            took, rounds = time.monotonic() - attempt.began, attempt.round - attempt.first + 1
            attempt.outcome = Outcome(attempt.job, "finished", seconds=took, rounds=rounds)
        elif message != STARTED:
            attempt.first = attempt.first or message["round"]
            attempt.record = message

    def _ended(self, attempt: _Attempt) -> None:
        """A process has ended, or is about to: note the outcome, or try again."""
        _end(attempt.process, time.monotonic() + PATIENCE)
        self._running.remove(attempt)
        self.places.release(attempt.process)
        self._pace.add(attempt.job.label, attempt.units_done, time.monotonic() - attempt.began)
        if attempt.outcome is not None:
            status = "" if attempt.outcome.status == "finished" else f" {attempt.outcome.status}"
            self._last = (attempt.job.label + status, attempt.record)
            self.outcomes.append(attempt.outcome)
            return
        died = f"its process {attempt.process.manner_of_death}"
        died += f" after round {attempt.round}" if attempt.record else ""
        if attempt.process.exitcode == 1 and not attempt.started:
            self.outcomes.append(Outcome(attempt.job, "failed", CANNOT_START, FedadcError.exit_code))
        else:
            self._try_again(attempt.job, attempt.number, died)

    def _try_again(self, job: Job, number: int, problem: str) -> None:
        """Put a job back to the front of the queue, unless this was the last attempt."""
        if number < ATTEMPTS:
            log.warning("%s: %s; it is started again", job.path, problem)
            self._before[job.path] = rounds_done(job.path)
            self._waiting.appendleft((job, number + 1))
        else:
            message = (
                f"{problem}, {ATTEMPTS} times in all; if memory is short, use fewer `jobs` (finished runs are kept)."
            )
            self.outcomes.append(Outcome(job, "failed", message, WorkersLost.exit_code))

    def _show(self) -> None:
        if self.watch is not None:
            running = [RunProgress(a.job.label, a.round, a.job.config.rounds, a.record) for a in self._running]
            self.watch(Progress(len(self.jobs), len(self.outcomes), running, self._last, self._seconds_left()))

    def _seconds_left(self) -> float | None:
        now, learned = time.monotonic(), self._pace.copy()
        for attempt in self._running:
            learned.add(attempt.job.label, attempt.units_done, now - attempt.began)
        work = [(a.job.label, a.units_left) for a in self._running]
        work += [(job.label, _units(job, job.last - self._before[job.path])) for job, _ in self._waiting]
        times = [learned.seconds(kind, units) for kind, units in work]
        known = [t for t in times if t is not None]
        return remaining(known, self.slots) if len(known) == len(times) else None

    def _stop(self) -> None:
        """End all processes. Each saves its run first; one that takes too long is killed."""
        with deferred_signals(drop=True):
            running, self._running = self._running, []
            for attempt in running:
                attempt.process.signal(signal.SIGTERM)
            until = time.monotonic() + PATIENCE
            for attempt in running:
                _end(attempt.process, until)


def _end(process: RunProcess, until: float) -> None:
    """Wait until a process has ended; kill it if it takes too long.

    Its end of the pipe is closed when it has ended. `join` says so too early if the process server has died.
    """
    with suppress(EOFError, OSError):
        while process.pipe.poll(max(0.0, until - time.monotonic())):
            process.pipe.recv()
        process.signal(KILL)
        while process.pipe.poll(PATIENCE):
            process.pipe.recv()
    process.pipe.close()
    process.join(PATIENCE)
