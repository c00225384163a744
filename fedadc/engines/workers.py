"""Clients in worker processes of one thread each. Messages are small; vectors and data are in shared memory.

Clients are handed out in cohort order to the worker with the fewest jobs, and results are yielded in the same order; at
most 2 × workers + 2 uploads are in memory.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from fedadc.data.dataset import Clients, Dataset, Samples
from fedadc.engines.blocks import grouped
from fedadc.engines.pool import AHEAD, PRELOADED, Assignment, WorkerPool, WorkerProcess, require_may_start_processes
from fedadc.engines.shared_data import SharedData
from fedadc.engines.shared_memory import SharedTensors, Slots, layout_of
from fedadc.engines.worker import EVALUATED, CountingJob, TrainingAnswer, TrainingJob, WorkerSetup
from fedadc.errors import FedadcError, one_line, require
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch, MetricCounter
from fedadc.models.vectors import State, Vector
from fedadc.system.processes import start_process_server
from fedadc.system.user_code import loaded_modules
from fedadc.training.aggregate import ClientReport, PartialSum, room_for_sum
from fedadc.training.agreement import Agreement
from fedadc.training.messages import ClientTask, ServerBroadcast


def share_data(data: Dataset, clients: Clients) -> SharedData:
    """Copy the data to shared memory; worker processes import what they need in the meantime."""
    require_may_start_processes()
    start_process_server(PRELOADED)
    return SharedData(data, clients)


class Workers:
    """An engine of so many processes. `counter` uses the shared data."""

    def __init__(
        self, agreement: Agreement, counter: MetricCounter, data: SharedData, count: int, downlink: State
    ) -> None:
        self.agreement, self.counter, self.workers = agreement, counter, count
        theta = agreement.model.theta.cpu()
        kept = agreement.client_state(theta)
        uploads = {f"sum {name}": vector for name, vector in room_for_sum(agreement, theta).items()}
        self._stateful = bool(kept)
        self._data = data
        self._slots = Slots(2 * count + 2, layout_of({**uploads, **kept})[1])
        self._published = SharedTensors({EVALUATED: theta, "theta": theta, **downlink})
        self._version = 0  # of what is published
        self._pool = WorkerPool(count, agreement.model.device, self._setup, self._slots)
        self._to_count: deque[CountingJob] = deque()  # of the present evaluation
        self._counting: deque[int] = deque()  # numbers of its jobs that were handed out
        self._training = False

    def run(
        self, broadcast: ServerBroadcast, tasks: Sequence[ClientTask], states: Mapping[int, State]
    ) -> Iterator[PartialSum]:
        require(not self._training, "a federation with workers trains one round at a time.")
        free = list(range(2 * self.workers + 2))  # slots

        def assigned(group: Sequence[ClientTask]) -> Assignment:
            slot, state = free.pop(), states.get(group[0].client)
            parcel = None if state is None else self._slots.put(slot, state)[0]
            clients = tuple((task.client, task.steps, task.weight) for task in group)
            job = TrainingJob(version, broadcast.round, broadcast.lr, broadcast.mean_samples, clients, slot, parcel)
            return self._pool.assignment(job, state)

        stateful = self._stateful or bool(states)
        groups = ([task] for task in tasks) if stateful else grouped(tasks, self.workers)
        self._training = True
        try:
            self._publish({"theta": broadcast.theta, **broadcast.server})
            version = self._version
            for answer in self._trained(map(assigned, groups), lambda: bool(free)):
                yield self._partial_sum(answer)
                free.append(answer.slot)
        finally:
            self._training = False

    def count(self, theta: Vector, batches: Sequence[EvaluationBatch]) -> Iterator[BatchCounts]:
        """Count predictions. Workers without a client to train begin even before the counts are asked for."""
        self._publish({EVALUATED: theta})
        self._pool.forget_counting()  # of another evaluation
        self._to_count = deque(CountingJob(self._version, batch) for batch in batches)
        self._counting = deque()
        return self._counted()

    def _trained(self, work: Iterator[Assignment], may_start: Callable[[], bool]) -> Iterator[TrainingAnswer]:
        """The answers in the order of the jobs, while the workers are kept busy."""
        pool = self._pool
        given: deque[int] = deque()
        more = True
        with self._closing_on_failure():
            while more or given:
                while more and may_start() and (worker := pool.idlest()):
                    assignment = next(work, None)
                    more = assignment is not None
                    if assignment is not None:
                        given.append(assignment.number)
                        pool.give(worker, assignment)
                while not more and self._to_count and (worker := pool.idlest(AHEAD - 1)):
                    self._give_count(worker)
                if given and given[0] in pool.answers:
                    yield pool.answers.pop(given.popleft())
                elif given:
                    pool.receive()

    def _counted(self) -> Iterator[BatchCounts]:
        pool = self._pool
        with self._closing_on_failure():
            while self._to_count or self._counting:
                while self._to_count and (worker := pool.idlest()):
                    self._give_count(worker)
                if self._counting[0] in pool.answers:
                    yield pool.answers.pop(self._counting.popleft())
                else:
                    pool.receive()

    def _give_count(self, worker: WorkerProcess) -> None:
        assignment = self._pool.assignment(self._to_count.popleft())
        self._counting.append(assignment.number)
        self._pool.give(worker, assignment)

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # also when the consumer stops early: what the workers still do is of no use
            self.close()
            raise

    def _partial_sum(self, answer: TrainingAnswer) -> PartialSum:
        device = self.agreement.model.device
        total = {name: vector.to(device) for name, vector in self._slots.get(answer.sum).items()}
        reports = []
        for parcel, facts in zip(answer.states, answer.facts, strict=True):
            own = {name: v.to(device, copy=True) for name, v in self._slots.get(parcel).items()}  # it outlives the slot
            reports.append(ClientReport(*facts, own))
        return PartialSum(total, reports)

    def _publish(self, vectors: State) -> None:
        self._version += 1
        views = self._published.views()
        for name, vector in vectors.items():
            if views[name].shape != vector.shape or views[name].dtype != vector.dtype:
                raise FedadcError(f"the server's {name} must keep its shape and type to be sent to workers.")
            views[name].copy_(vector)

    def _setup(self) -> WorkerSetup:
        splits = {name: _empty(samples) for name, samples in self.counter.splits.items()}
        try:
            agreement = replace(self.agreement, start=self.agreement.start[:0])  # workers need no initial weights
            pickled = pickle.dumps((agreement, replace(self.counter, splits=splits)))
        except Exception as error:
            raise FedadcError(
                "workers need a model, a method and an objective that can be sent to another process "
                f"({one_line(error)}): define them in a file, without lambdas; workers=0 works without."
            ) from error
        return WorkerSetup(loaded_modules(), pickled, self._data, self._published, self._slots)

    def take_events(self) -> tuple[str, ...]:
        return self._pool.take_events()

    def close(self) -> None:
        self._pool.close()
        self._to_count.clear()
        self._counting.clear()


def _empty(samples: Samples) -> Samples:
    return samples.take(np.zeros(0, dtype=np.int64))
