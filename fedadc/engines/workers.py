"""Clients in worker processes of one thread each. Only small messages travel; vectors and data lie in shared memory.

The parent hands out clients in cohort order to whichever worker has the least to do, and yields their reports in the
same order; at most 2 × workers + 2 uploads are in memory. Which worker ran a client, and when, changes no bit; so where
a worker dies, another takes its place and does again what it had not answered.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from fedadc.data.dataset import Clients, Samples
from fedadc.engines.shared import SharedTensors, Slots, layout_of
from fedadc.engines.worker import MEASURED, READY, Desk, Failed, MeasuringTask, Trained, TrainingTask, serve, with_data
from fedadc.errors import FedadcError, one_line, require
from fedadc.evaluate import Cut, Examiner, Tally
from fedadc.exact import device_of
from fedadc.federation.aggregate import BLOCK, Part
from fedadc.federation.local import Broadcast, Order, Report, Workplace
from fedadc.methods.base import State, Vector
from fedadc.processes import context, get_ready
from fedadc.schema import user_folders

log = logging.getLogger("fedadc")
AHEAD = 2  # tasks that a worker has at a time, so that it never waits for the next
MOST_DEATHS = 3  # of workers over one task, or per worker without an answer from any


@dataclass
class _Assignment:
    number: int
    task: TrainingTask | MeasuringTask
    state: State | None = None  # of its client: the one in the slot gives way to the answer
    deaths: int = 0  # of workers that were busy with it


@dataclass
class _Worker:
    seat: int  # 0, 1, ...
    process: BaseProcess
    pipe: Connection
    tasks: list[_Assignment] = field(default_factory=list)  # what it was given and has not answered, in order
    is_ready: bool = False  # it has taken its seat


class Workers:
    """An engine of so many processes, spawned when they are first needed."""

    def __init__(self, place: Workplace, examiner: Examiner, count: int, downlink: State) -> None:
        _require_a_process_that_may_start_others()
        get_ready()  # they import while the data is copied
        self.count = count
        method, theta = place.method, place.model.theta.cpu()
        kept = place.client_state(theta)
        uploads = {f"upload {n}": theta for n in range(1 + len(method.tracked))}
        self._stateful = bool(kept)
        self._slots = Slots(2 * count + 2, layout_of({**uploads, **kept})[1])
        self._published = SharedTensors({MEASURED: theta, "theta": theta, **downlink})
        self._data = _shared(place, examiner)
        self.place, self.examiner = with_data(place, examiner, self._data)
        self._workers: list[_Worker] = []
        self._given = 0  # tasks so far; each has its number
        self._again: deque[_Assignment] = deque()  # of workers that died
        self._deaths = 0  # since the last answer
        self._events: list[str] = []
        self._heard: dict[int, Any] = {}  # answers whose turn has not come
        self._uncounted: deque[MeasuringTask] = deque()  # of the present evaluation
        self._counting: deque[int] = deque()
        self._version = 0  # of what is published
        self._training = False

    def run(self, broadcast: Broadcast, orders: Sequence[Order]) -> Iterator[Part]:
        require(not self._training, "a federation with workers trains one round at a time.")
        free = list(range(2 * self.count + 2))

        def assigned(share: Sequence[Order]) -> _Assignment:
            slot, state = free.pop(), share[0].state
            parcel = None if state is None else self._slots.put(slot, state)[0]
            told = tuple((order.client, order.steps, order.weight) for order in share)
            task = TrainingTask(version, broadcast.round, broadcast.lr, told, slot, parcel)
            return _Assignment(self._number(), task, state)

        stateful = self._stateful or any(order.states for order in orders)
        shares = ([order] for order in orders) if stateful else _shares(orders, self.count)
        self._training = True
        try:
            self._publish({"theta": broadcast.theta, **broadcast.server})
            version = self._version
            for answer in self._trained(map(assigned, shares), lambda: bool(free)):
                yield self._part(answer)
                free.append(answer.slot)
        finally:
            self._training = False

    def measure(self, theta: Vector, cuts: Sequence[Cut]) -> Iterator[Tally]:
        """Workers that have nothing to train begin to count even before the tallies are asked for."""
        self._publish({MEASURED: theta})
        self._again = deque(a for a in self._again if isinstance(a.task, TrainingTask))  # not of another evaluation
        self._uncounted = deque(MeasuringTask(self._version, cut) for cut in cuts)
        self._counting = deque()
        return self._tallies()

    def _trained(self, work: Iterator[_Assignment], may_start: Callable[[], bool]) -> Iterator[Trained]:
        """Each task's answer in the order of the tasks, while the workers are kept busy."""
        given: deque[int] = deque()
        more = True
        with self._closing_on_failure():
            while more or given:
                while more and may_start() and (worker := self._idlest()):
                    assignment = next(work, None)
                    more = assignment is not None
                    if assignment is not None:
                        given.append(assignment.number)
                        self._give(worker, assignment)
                while not more and self._uncounted and (worker := self._idlest(AHEAD - 1)):
                    self._count(worker)
                if given and given[0] in self._heard:
                    yield self._heard.pop(given.popleft())
                elif given:
                    self._hear()

    def _tallies(self) -> Iterator[Tally]:
        with self._closing_on_failure():
            while self._uncounted or self._counting:
                while self._uncounted and (worker := self._idlest()):
                    self._count(worker)
                if self._counting[0] in self._heard:
                    yield self._heard.pop(self._counting.popleft())
                else:
                    self._hear()

    def _idlest(self, limit: int = AHEAD) -> _Worker | None:
        """The worker with the least to do, if that is less than the limit."""
        if not self._workers:
            self._spawn()
        worker = min(self._workers, key=lambda w: len(w.tasks))
        return worker if len(worker.tasks) < limit else None

    def _listener(self) -> _Worker:
        """A worker with nothing to do: it will read what is too large for a pipe, and not wait for us to read first."""
        while (worker := self._idlest(1)) is None:
            self._hear()
        return worker

    def _number(self) -> int:
        """Under which an answer will be heard."""
        self._given += 1
        return self._given

    def _count(self, worker: _Worker) -> None:
        assignment = _Assignment(self._number(), self._uncounted.popleft())
        self._counting.append(assignment.number)
        self._give(worker, assignment)

    def _give(self, worker: _Worker, assignment: _Assignment) -> None:
        if isinstance(assignment.task, TrainingTask) and assignment.task.is_large:
            worker = self._listener()
        worker.tasks.append(assignment)
        try:
            worker.pipe.send(assignment.task)
        except OSError:
            self._replace(worker)

    def _hear(self) -> None:
        """Wait for answers."""
        while self._again and (free := self._idlest()):
            self._give(free, self._again.popleft())
        for ready in wait([w.pipe for w in self._workers]):
            worker = next(w for w in self._workers if w.pipe is ready)
            try:
                self._note(worker, worker.pipe.recv())
            except (EOFError, OSError):
                self._replace(worker)

    def _note(self, worker: _Worker, answer: Any) -> None:
        if isinstance(answer, Failed):
            raise _error_of(answer)
        if answer == READY:
            worker.is_ready = True
            return
        self._heard[worker.tasks.pop(0).number] = answer
        self._deaths = 0

    def _replace(self, worker: _Worker) -> None:
        """Put a new worker in the place of one that is gone; what it had not answered will be done again."""
        with suppress(EOFError, OSError):
            while worker.pipe.poll():
                self._note(worker, worker.pipe.recv())  # what it said last
        worker.process.join(5)
        code, lost = worker.process.exitcode, worker.tasks
        require(code != 1 or worker.is_ready, CANNOT_START)
        self._deaths += 1
        busy = lost[:1] if worker.is_ready else []  # one that had not begun is no task's fault
        for assignment in busy:
            assignment.deaths += 1
        doing, over_it = _described(busy), max((a.deaths for a in busy), default=0)
        require(
            over_it < MOST_DEATHS and self._deaths < MOST_DEATHS * self.count,
            f"{max(over_it, self._deaths)} worker processes died one after another, the last one {_manner(code)}"
            f"{doing}; if memory is short, fewer workers need less (--workers).",
        )
        self._note_event(f"worker {worker.seat + 1} {_manner(code)}{doing}; a new one takes its place")
        worker.pipe.close()
        self._workers[self._workers.index(worker)] = self._hired(worker.seat, self._desk())
        for assignment in lost:
            if assignment.state is not None and isinstance(assignment.task, TrainingTask):
                self._slots.put(assignment.task.slot, assignment.state)
        self._again.extendleft(reversed(lost))

    def _note_event(self, event: str) -> None:
        log.warning(event)
        self._events.append(event)

    def take_events(self) -> tuple[str, ...]:
        events, self._events = tuple(self._events), []
        return events

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # also when nobody asks any more: what the workers still do is of no use
            self.close()
            raise

    def _part(self, answer: Trained) -> Part:
        device = self.place.model.device
        total = {name: vector.to(device) for name, vector in self._slots.get(answer.sum).items()}
        reports = []
        for parcel, (client, *facts) in zip(answer.states, answer.facts, strict=True):
            own = {name: v.to(device, copy=True) for name, v in self._slots.get(parcel).items()}  # it outlives the slot
            reports.append(Report(client, {}, own, *facts))
        return Part(total, reports)

    def _publish(self, vectors: State) -> None:
        self._version += 1
        views = self._published.views()
        for name, vector in vectors.items():
            alike = views[name].shape == vector.shape and views[name].dtype == vector.dtype
            require(alike, f"the server's {name} must keep its shape and type to be sent to workers.")
            views[name].copy_(vector)

    def _spawn(self) -> None:
        desk = self._desk()
        for seat in range(self.count):
            self._workers.append(self._hired(seat, desk))

    def _desk(self) -> Desk:
        place = replace(self.place, train=_none(self.place.train), clients=Clients(np.zeros(0, int), np.zeros(1, int)))
        splits = {name: _none(samples) for name, samples in self.examiner.splits.items()}
        try:
            pickled = pickle.dumps((place, replace(self.examiner, splits=splits)))
        except Exception as error:
            raise FedadcError(
                "workers need a model, a method and an objective that can be sent to another process "
                f"({one_line(error)}): define them in a file, without lambdas; workers=0 does without."
            ) from error
        return Desk(user_folders(), pickled, self._data, self._published, self._slots)

    def _hired(self, seat: int, desk: Desk) -> _Worker:
        for patience in (0.1, 0.5, 2.0, None):
            get_ready()  # the server may have died too
            start = context()
            try:
                ours, theirs = start.Pipe()
                process = start.Process(  # type: ignore[attr-defined]
                    target=serve, args=(theirs, desk, device_of(seat, self.place.model.device)), daemon=True
                )
                process.start()
            except (OSError, EOFError) as error:  # also a server that is dying, and not yet known to be dead
                if patience is None:
                    raise FedadcError(f"worker {seat + 1} of {self.count} cannot be started ({error}).") from error
                time.sleep(patience)
            else:
                break
        theirs.close()
        return _Worker(seat, process, ours)

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for waiting in (self._heard, self._uncounted, self._counting, self._again):
            waiting.clear()
        self._deaths = 0
        for worker in workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


def _require_a_process_that_may_start_others() -> None:
    this = multiprocessing.current_process()
    require(
        not getattr(this, "_inheriting", False),
        'a script that uses workers must do so under `if __name__ == "__main__":`.',
    )
    require(not this.daemon, "a daemonic process, such as a Pool's, may not start workers; give it workers=0.")


CANNOT_START = (  # an exception before its first task: Python runs the main script again to find its classes
    "a worker process could not start; what it printed stands above. A script that uses workers must do so "
    'under `if __name__ == "__main__":`, and not come from standard input; with workers=0 any script works.'
)


def _manner(code: int | None) -> str:
    """How a process ended."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def _described(lost: Sequence[_Assignment]) -> str:
    """What a worker was doing."""
    if not lost:
        return ""
    task = lost[0].task
    if isinstance(task, MeasuringTask):
        return " during the evaluation"
    return f" in round {task.round}, client {' or '.join(str(client) for client, *_ in task.orders)}"


def _error_of(answer: Failed) -> Exception:
    if answer.message is not None:
        error = FedadcError(answer.message)
        error.add_note(f"in {answer.where}")
        error.add_note(f"in a worker process:\n{answer.trace}")
        return error
    return RuntimeError(f"{answer.where} failed in a worker process:\n{answer.trace}")


def _none(samples: Samples) -> Samples:
    return samples.take(np.zeros(0, dtype=np.int64))


def _shared(place: Workplace, examiner: Examiner) -> SharedTensors:
    """All data once, whatever the number of workers."""
    tensors = {"train.x": place.train.x, "train.y": place.train.y}
    tensors |= {f"{name}.{part}": getattr(s, part) for name, s in examiner.splits.items() for part in ("x", "y")}
    tensors |= {"indices": torch.from_numpy(place.clients.indices), "offsets": torch.from_numpy(place.clients.offsets)}
    return SharedTensors(tensors)


def _shares(orders: Sequence[Order], workers: int) -> Iterator[Sequence[Order]]:
    """Whole blocks, added up where they are trained, while there is plenty for everybody; then single clients."""
    left = sum(order.steps for order in orders)
    for start in range(0, len(orders), BLOCK):
        block = orders[start : start + BLOCK]
        work = sum(order.steps for order in block)
        left -= work
        if len(block) == BLOCK and left >= workers * work:
            yield block
        else:
            yield from ([order] for order in block)
