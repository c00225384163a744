"""Worker processes: started when they are first needed, given jobs, replaced when they die.

Which worker did a job, and when, changes no bit of its answer; so where a worker dies, another repeats what it had not
answered.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fedadc.engines.failures import Failure, error_of
from fedadc.engines.pooled import AHEAD, COUNTING_IN_WORDS, EventLog, training_in_words
from fedadc.engines.shared_memory import Slots
from fedadc.engines.worker import READY, CountingJob, TrainingJob, WorkerSetup, serve
from fedadc.errors import WorkersLost, require
from fedadc.models.vectors import State
from fedadc.system.determinism import device_of
from fedadc.system.processes import context, manner_of_death, start_process_server

MOST_DEATHS = 3  # of workers during one job, or per worker without an answer from any
PRELOADED = "fedadc.engines.worker"


@dataclass
class Assignment:
    """A job that was handed out, and what is needed to do it again."""

    number: int
    job: TrainingJob | CountingJob
    state: State | None = None  # of its client: the answer overwrites the one in the slot
    deaths: int = 0  # of workers that were busy with it


@dataclass
class WorkerProcess:
    number: int  # 0, 1, ...
    process: BaseProcess
    pipe: Connection
    assigned: list[Assignment] = field(default_factory=list)  # not answered yet, in order
    is_ready: bool = False  # it has loaded its setup


class WorkerPool:
    """A fixed number of worker processes. Answers are kept under the number of their job until they are taken."""

    def __init__(self, count: int, device: torch.device, setup: Callable[[], WorkerSetup], slots: Slots) -> None:
        self.count, self.device = count, device
        self.answers: dict[int, Any] = {}
        self._setup, self._slots = setup, slots
        self._workers: list[WorkerProcess] = []
        self._jobs = 0  # so far; each has its number
        self._again: deque[Assignment] = deque()  # of workers that died
        self._deaths = 0  # since the last answer
        self.events = EventLog()

    def assignment(self, job: TrainingJob | CountingJob, state: State | None = None) -> Assignment:
        self._jobs += 1
        return Assignment(self._jobs, job, state)

    def idlest(self, limit: int = AHEAD) -> WorkerProcess | None:
        """The worker with the fewest jobs, if it has fewer than the limit."""
        if not self._workers:
            setup = self._setup()
            for number in range(self.count):
                self._workers.append(self._start(number, setup))
        worker = min(self._workers, key=lambda w: len(w.assigned))
        return worker if len(worker.assigned) < limit else None

    def give(self, worker: WorkerProcess, assignment: Assignment) -> None:
        if isinstance(assignment.job, TrainingJob) and assignment.job.is_large:
            worker = self._free_worker()
        worker.assigned.append(assignment)
        try:
            worker.pipe.send(assignment.job)
        except OSError:
            self._replace(worker)

    def _free_worker(self) -> WorkerProcess:
        """A worker with nothing to do: it reads a job too large for the pipe at once, so neither side blocks."""
        while (worker := self.idlest(1)) is None:
            self.receive()
        return worker

    def receive(self) -> None:
        """Wait for answers."""
        while self._again and (free := self.idlest()):
            self.give(free, self._again.popleft())
        for ready in wait([w.pipe for w in self._workers]):
            worker = next(w for w in self._workers if w.pipe is ready)
            try:
                self._accept(worker, worker.pipe.recv())
            except (EOFError, OSError):
                self._replace(worker)

    def _accept(self, worker: WorkerProcess, answer: Any) -> None:
        if isinstance(answer, Failure):
            raise error_of(answer)
        if answer == READY:
            worker.is_ready = True
            return
        self.answers[worker.assigned.pop(0).number] = answer
        self._deaths = 0

    def forget_counting(self) -> None:
        """Give up repeating the jobs of an evaluation that is no longer waited for."""
        self._again = deque(a for a in self._again if isinstance(a.job, TrainingJob))

    def _replace(self, worker: WorkerProcess) -> None:
        """Start a new worker in the place of one that died; it repeats what was not answered."""
        with suppress(EOFError, OSError):
            while worker.pipe.poll():
                self._accept(worker, worker.pipe.recv())  # its last answers
        worker.process.join(5)
        code, lost = worker.process.exitcode, worker.assigned
        require(code != 1 or worker.is_ready, CANNOT_START)
        self._deaths += 1
        busy = lost[:1] if worker.is_ready else []  # a worker that had not begun died of no job
        for assignment in busy:
            assignment.deaths += 1
        doing, over_it = _described(busy), max((a.deaths for a in busy), default=0)
        if over_it >= MOST_DEATHS or self._deaths >= MOST_DEATHS * self.count:
            raise WorkersLost(
                f"{max(over_it, self._deaths)} worker processes died one after another, the last one "
                f"{manner_of_death(code)}{doing}; if memory is short, use fewer `workers`."
            )
        self.events.record(f"worker {worker.number + 1} {manner_of_death(code)}{doing}; a new one takes its place")
        worker.pipe.close()
        self._workers[self._workers.index(worker)] = self._start(worker.number, self._setup())
        for assignment in lost:
            if assignment.state is not None and isinstance(assignment.job, TrainingJob):
                self._slots.put(assignment.job.slot, assignment.state)
        self._again.extendleft(reversed(lost))

    def _start(self, number: int, setup: WorkerSetup) -> WorkerProcess:
        for patience in (0.1, 0.5, 2.0, None):
            start_process_server(PRELOADED)  # the server may have died too
            start = context()
            try:
                ours, theirs = start.Pipe()
                process = start.Process(  # type: ignore[attr-defined]
                    target=serve, args=(theirs, setup, device_of(number, self.device)), daemon=True
                )
                process.start()
            except (OSError, EOFError) as error:  # also a server that is dying, and not yet known to be dead
                if patience is None:
                    raise WorkersLost(f"worker {number + 1} of {self.count} cannot be started ({error}).") from error
                time.sleep(patience)
            else:
                break
        theirs.close()
        return WorkerProcess(number, process, ours)

    def close(self) -> None:
        workers, self._workers = self._workers, []
        self.answers.clear()
        self._again.clear()
        self._deaths = 0
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


def require_may_start_processes() -> None:
    this = multiprocessing.current_process()
    require(
        not getattr(this, "_inheriting", False),
        'a script that uses workers must do so under `if __name__ == "__main__":`.',
    )
    require(not this.daemon, "a daemonic process, such as a Pool's, may not start workers; give it workers=0.")


CANNOT_START = (  # an exception before its first job: Python runs the main script again to find its classes
    "a worker process could not start; its own message is above. A script that uses workers must do so "
    'under `if __name__ == "__main__":`, and not come from standard input; with workers=0 any script works.'
)


def _described(lost: Sequence[Assignment]) -> str:
    """What a worker was doing."""
    if not lost:
        return ""
    job = lost[0].job
    return COUNTING_IN_WORDS if isinstance(job, CountingJob) else training_in_words(job.round, job.clients)
