"""Clients in worker processes of one thread each. Only small messages travel; vectors and data lie in shared memory.

The parent hands out clients in cohort order to whichever worker has the least to do, and yields their reports in the
same order; at most 2 × workers + 2 uploads are in memory. Which worker ran a client, and when, changes no bit.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import numpy as np
import torch

from fedadc.data.dataset import Clients, Samples
from fedadc.engines.shared import SharedTensors, Slots, layout_of
from fedadc.engines.worker import MEASURED, Desk, Failed, MeasuringTask, Trained, TrainingTask, serve, with_data
from fedadc.errors import FedadcError, one_line, require
from fedadc.evaluate import Cut, Examiner, Tally
from fedadc.exact import device_of
from fedadc.federation.aggregate import BLOCK, Part
from fedadc.federation.local import Broadcast, Order, Report, Workplace
from fedadc.methods.base import State, Vector
from fedadc.processes import context, get_ready
from fedadc.schema import user_folders

AHEAD = 2  # tasks that a worker has at a time, so that it never waits for the next


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    tasks: list[int] = field(default_factory=list)  # numbers of what it was given, in order


class Workers:
    """An engine of so many processes, spawned when they are first needed."""

    def __init__(self, place: Workplace, examiner: Examiner, count: int, downlink: State) -> None:
        _require_a_process_that_may_start_others()
        get_ready()  # they import while the data is copied
        self.count = count
        method, theta = place.method, place.model.theta.cpu()
        kept = {**method.client_state(theta), **method.objective.client_state(theta)}
        uploads = {f"upload {n}": theta for n in range(1 + len(method.tracked))}
        self._stateful = bool(kept)
        self._slots = Slots(2 * count + 2, layout_of({**uploads, **kept})[1])
        self._published = SharedTensors({MEASURED: theta, "theta": theta, **downlink})
        self._data = _shared(place, examiner)
        self.place, self.examiner = with_data(place, examiner, self._data)
        self._workers: list[_Worker] = []
        self._given = 0  # tasks so far; each has its number
        self._heard: dict[int, Any] = {}  # answers whose turn has not come
        self._uncounted: deque[MeasuringTask] = deque()  # of the present evaluation
        self._counting: deque[int] = deque()
        self._version = 0  # of what is published
        self._training = False

    def run(self, broadcast: Broadcast, orders: Sequence[Order]) -> Iterator[Part]:
        require(not self._training, "a federation with workers trains one round at a time.")
        free = list(range(2 * self.count + 2))

        def task_of(share: Sequence[Order]) -> TrainingTask:
            slot, state = free.pop(), share[0].state
            parcel = None if state is None else self._slots.put(slot, state)[0]
            told = tuple((order.client, order.steps, order.weight) for order in share)
            return TrainingTask(version, broadcast.round, broadcast.lr, told, slot, parcel)

        stateful = self._stateful or any(order.states for order in orders)
        shares = ([order] for order in orders) if stateful else _shares(orders, self.count)
        self._training = True
        try:
            self._publish({"theta": broadcast.theta, **broadcast.server})
            version = self._version
            for answer in self._trained(map(task_of, shares), lambda: bool(free)):
                yield self._part(answer)
                free.append(answer.slot)
        finally:
            self._training = False

    def measure(self, theta: Vector, cuts: Sequence[Cut]) -> Iterator[Tally]:
        """Workers that have nothing to train begin to count even before the tallies are asked for."""
        self._publish({MEASURED: theta})
        self._uncounted = deque(MeasuringTask(self._version, cut) for cut in cuts)
        self._counting = deque()
        return self._tallies()

    def _trained(self, tasks: Iterator[TrainingTask], may_start: Callable[[], bool]) -> Iterator[Trained]:
        """Each task's answer in the order of the tasks, while the workers are kept busy."""
        given: deque[int] = deque()
        more = True
        with self._closing_on_failure():
            while more or given:
                while more and may_start() and (worker := self._idlest()):
                    task = next(tasks, None)
                    more = task is not None
                    if task is not None:
                        given.append(self._give(self._listener() if task.is_large else worker, task))
                while not more and self._uncounted and (worker := self._idlest(AHEAD - 1)):
                    self._counting.append(self._give(worker, self._uncounted.popleft()))
                if given and given[0] in self._heard:
                    yield self._heard.pop(given.popleft())
                elif given:
                    self._hear()

    def _tallies(self) -> Iterator[Tally]:
        with self._closing_on_failure():
            while self._uncounted or self._counting:
                while self._uncounted and (worker := self._idlest()):
                    self._counting.append(self._give(worker, self._uncounted.popleft()))
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

    def _give(self, worker: _Worker, task: TrainingTask | MeasuringTask) -> int:
        """The number under which the answer will be heard."""
        self._given += 1
        try:
            worker.pipe.send(task)
        except OSError:
            self._take_leave(worker)
        worker.tasks.append(self._given)
        return self._given

    def _hear(self) -> None:
        """Wait for answers."""
        for ready in wait([w.pipe for w in self._workers]):
            worker = next(w for w in self._workers if w.pipe is ready)
            try:
                self._note(worker, worker.pipe.recv())
            except (EOFError, OSError):
                self._take_leave(worker)

    def _note(self, worker: _Worker, answer: Any) -> None:
        if isinstance(answer, Failed):
            raise _error_of(answer)
        self._heard[worker.tasks.pop(0)] = answer

    def _take_leave(self, worker: _Worker) -> NoReturn:
        """Of a worker that is gone: by what it said last, if it said why."""
        with suppress(EOFError, OSError):
            while worker.pipe.poll():
                self._note(worker, worker.pipe.recv())
        worker.process.join(5)
        raise FedadcError(_why_it_ended(worker.process.exitcode))

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
        start, model = context(), self.place.model
        place = replace(self.place, train=_none(self.place.train), clients=Clients(np.zeros(0, int), np.zeros(1, int)))
        splits = {name: _none(samples) for name, samples in self.examiner.splits.items()}
        try:
            pickled = pickle.dumps((place, replace(self.examiner, splits=splits)))
        except Exception as error:
            raise FedadcError(
                "workers need a model, a method and an objective that can be sent to another process "
                f"({one_line(error)}): define them in a file, without lambdas; workers=0 does without."
            ) from error
        desk = Desk(user_folders(), pickled, self._data, self._published, self._slots)
        for number in range(self.count):
            try:
                ours, theirs = start.Pipe()
                process = start.Process(  # type: ignore[attr-defined]
                    target=serve, args=(theirs, desk, device_of(number, model.device)), daemon=True
                )
                process.start()
            except OSError as error:
                raise FedadcError(f"worker {number + 1} of {self.count} cannot be started ({error}).") from error
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for waiting in (self._heard, self._uncounted, self._counting):
            waiting.clear()
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


def _why_it_ended(code: int | None) -> str:
    if code == 1:  # an exception before its first task: Python runs the main script again to find its classes
        return (
            "a worker process could not start; what it printed stands above. A script that uses workers must do so "
            'under `if __name__ == "__main__":`, and not come from standard input; with workers=0 any script works.'
        )
    return (
        f"a worker process ended by itself (exit code {code}); was it killed, or is memory short? "
        "Fewer workers need less."
    )


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
