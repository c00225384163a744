"""Clients in worker processes of one thread each. Messages are small; vectors and data are in shared memory.

Clients are handed out in cohort order to the worker with the fewest jobs, and results are yielded in the same order; at
most 2 × workers + 2 uploads are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedadc.data.dataset import Clients, Dataset
from fedadc.engines.blocks import grouped
from fedadc.engines.pool import PRELOADED, Assignment, WorkerPool, WorkerProcess, require_may_start_processes
from fedadc.engines.pooled import PooledEngine
from fedadc.engines.shared_data import SharedData
from fedadc.engines.shared_memory import SharedTensors, Slots, layout_of
from fedadc.engines.trainer import packed
from fedadc.engines.worker import EVALUATED, CountingJob, TrainingAnswer, TrainingJob, WorkerSetup
from fedadc.errors import FedadcError, require
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch, MetricCounter
from fedadc.models.vectors import State, Vector
from fedadc.system.processes import start_process_server
from fedadc.system.user_code import loaded_modules
from fedadc.training.aggregate import ClientReport, PartialSum, room_for_sum
from fedadc.training.agreement import Agreement
from fedadc.training.messages import ClientTask, ServerBroadcast

Assign = Callable[[Sequence[ClientTask], int], Assignment]


def share_data(data: Dataset, clients: Clients) -> SharedData:
    """Copy the data to shared memory; worker processes import what they need in the meantime."""
    require_may_start_processes()
    start_process_server(PRELOADED)
    return SharedData(data, clients)


class Workers(PooledEngine[WorkerProcess]):
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
        self._processes = WorkerPool(count, agreement.model.device, self._setup, self._slots)
        self._training = False
        super().__init__(self._processes)

    def run(
        self, broadcast: ServerBroadcast, tasks: Sequence[ClientTask], states: Mapping[int, State]
    ) -> Iterator[PartialSum]:
        require(not self._training, "a federation with workers trains one round at a time.")
        stateful = self._stateful or bool(states)
        self._training = True
        try:
            self._publish({"theta": broadcast.theta, **broadcast.server})
            groups = ([task] for task in tasks) if stateful else grouped(tasks, self.workers)
            work = _RoundWork(list(groups), self._assigned(broadcast, states), list(range(2 * self.workers + 2)))
            for answer in self._trained(work):
                yield self._partial_sum(answer)
                work.free.append(answer.slot)
        finally:
            self._training = False

    def _assigned(self, broadcast: ServerBroadcast, states: Mapping[int, State]) -> Assign:
        """Makes the job of a group of clients, with a slot for its answer."""
        version = self._version

        def assigned(group: Sequence[ClientTask], slot: int) -> Assignment:
            state = states.get(group[0].client)
            parcel = None if state is None else self._slots.put(slot, state)[0]
            clients = tuple((task.client, task.steps, task.weight) for task in group)
            job = TrainingJob(version, broadcast.round, broadcast.lr, broadcast.mean_samples, clients, slot, parcel)
            return self._processes.assignment(job, state)

        return assigned

    def count(self, theta: Vector, batches: Sequence[EvaluationBatch]) -> Iterator[BatchCounts]:
        self._publish({EVALUATED: theta})
        return self._start_counting(CountingJob(self._version, batch) for batch in batches)

    def _counting_assignment(self, job: CountingJob) -> Assignment:
        return self._processes.assignment(job)

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
        content = packed(self.agreement, self.counter)
        return WorkerSetup(loaded_modules(), content, self._data, self._published, self._slots)


@dataclass
class _RoundWork:
    """The groups of clients of a round, which are handed out in cohort order as slots become free."""

    groups: Sequence[Sequence[ClientTask]]
    assigned: Assign
    free: list[int]  # slots
    position: int = 0

    @property
    def left(self) -> bool:
        return self.position < len(self.groups)

    def take(self, worker: WorkerProcess) -> tuple[int, Assignment] | None:
        if not self.free:
            return None
        self.position += 1
        return self.position - 1, self.assigned(self.groups[self.position - 1], self.free.pop())
