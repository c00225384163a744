"""The engine that trains clients on a Ray cluster.

Data, theta and the downlink vectors are in the object store of every node, once. Uploads are added up where they are
trained, in blocks of 8 as everywhere, and added here in cohort order. The states of clients stay on the nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from fedadc.cluster.actor import RoundJob
from fedadc.cluster.arrays import Arrays, to_arrays, to_tensors, view
from fedadc.cluster.connection import Connection, import_ray
from fedadc.cluster.pool import ActorPool, CountJob, NodeJob, NodeState, NodeWorker, PlacedAnswer
from fedadc.cluster.settings import RayCluster
from fedadc.cluster.supplies import Supplies
from fedadc.data.dataset import Clients, Dataset
from fedadc.engines.blocks import grouped
from fedadc.engines.pooled import PooledEngine
from fedadc.errors import StatesLost, one_line, require
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch, MetricCounter
from fedadc.models.vectors import State, Vector
from fedadc.training.aggregate import ClientReport, PartialSum
from fedadc.training.agreement import Agreement
from fedadc.training.messages import ClientTask, ServerBroadcast

LOOKED_AT = 8  # waiting clients among which a worker gets one whose state is on its node


class RayEngine(PooledEngine[NodeWorker]):
    """Clients on the nodes of a cluster."""

    def __init__(
        self, agreement: Agreement, counter: MetricCounter, data: Dataset, clients: Clients, settings: RayCluster
    ) -> None:
        import_ray()  # if it is not installed, the user should know before the data is dealt with
        self.agreement, self.counter, self.settings = agreement, counter, settings
        self._connection = Connection(settings)
        device = "cuda" if settings.gpus_per_worker else agreement.model.device.type
        self._supplies = Supplies(settings.load, settings.patience, (agreement, counter), data, clients)
        self._actors = ActorPool(self._connection, device, self._supplies)
        self._stateful = bool(agreement.client_state(agreement.model.theta))
        self._states: WeakValueDictionary[int, NodeState] = WeakValueDictionary()  # those that exist
        self._published: dict[str, tuple[Tensor, Any]] = {}  # the last vectors that were sent, with their references
        self._version = 0
        self._training = False
        super().__init__(self._actors)

    def run(
        self, broadcast: ServerBroadcast, tasks: Sequence[ClientTask], states: Mapping[int, State]
    ) -> Iterator[PartialSum]:
        require(not self._training, "a federation on a cluster trains one round at a time.")
        self._training = True
        try:
            with self._closing_on_failure():
                self._connection.open()
                self._actors.refresh()
                work = self._work(broadcast, tasks, states)
            with closing(self._trained(work)) as answers:
                for answer in answers:
                    yield self._partial_sum(answer)
                    work.room += 1
        finally:
            self._training = False

    def _work(self, broadcast: ServerBroadcast, tasks: Sequence[ClientTask], states: Mapping[int, State]) -> PlacedWork:
        vectors = {"theta": broadcast.theta, **broadcast.server}
        references = tuple(self._publish(name, vector) for name, vector in vectors.items())
        self._version += 1
        fixed = (self._version, broadcast.round, broadcast.lr, broadcast.mean_samples, tuple(vectors))

        def assigned(group: Sequence[ClientTask]) -> NodeJob:
            clients = tuple((task.client, task.steps, task.weight) for task in group)
            return self._actors.assignment(RoundJob(*fixed, clients), _sent(states.get(group[0].client)), references)

        workers = self._actors.count
        if not self._stateful and not states:
            groups = list(grouped(tasks, workers))
            return PlacedWork(dict(enumerate(groups)), {}, assigned, workers, room=2 * workers + 2)
        where = {position: _node_of(states.get(task.client)) for position, task in enumerate(tasks)}
        return PlacedWork({p: [task] for p, task in enumerate(tasks)}, where, assigned, workers, room=2 * workers + 2)

    def count(self, theta: Vector, batches: Sequence[EvaluationBatch]) -> Iterator[BatchCounts]:
        with self._closing_on_failure():
            self._connection.open()
            reference = self._publish("theta", theta)
            self._version += 1
            return self._start_counting(CountJob(self._version, batch, reference) for batch in batches)

    def _counting_assignment(self, job: CountJob) -> NodeJob:
        return self._actors.assignment(job)

    def _publish(self, name: str, vector: Vector) -> Any:
        """A reference to a vector in the object store. The model that was just evaluated is not sent again."""
        known = self._published.get(name)
        if known is None or known[0] is not vector:
            known = (vector, import_ray().put(to_arrays({name: vector})[name]))
            self._published[name] = known
        return known[1]

    def _partial_sum(self, placed: PlacedAnswer) -> PartialSum:
        device = self.agreement.model.device
        total = {name: view(array).to(device) for name, array in placed.answer.sum.items()}  # which is only read
        size = placed.answer.state_bytes
        state: Any = {} if size is None else NodeState(placed.state, placed.node, size, self._fetched)
        if size is not None:
            self._states[id(state)] = state
        return PartialSum(total, [ClientReport(*facts, state) for facts in placed.answer.facts])

    def _fetched(self, reference: Any) -> State:
        ray = import_ray()
        try:
            require(reference is not None and ray.is_initialized(), "the cluster that had it is gone", StatesLost)
            return to_tensors(ray.get(reference, timeout=self.settings.patience))
        except (ray.exceptions.RayError, StatesLost) as error:
            raise StatesLost(f"the state of a client is lost with its node ({one_line(error):.160}).") from error

    def close(self) -> None:
        """Leave the cluster. States that are still in use are brought here."""
        until = time.monotonic() + self.settings.patience
        for state in list(self._states.values()):
            if time.monotonic() < until:
                state.bring_here()
            else:
                state.give_up()
        self._states.clear()
        super().close()
        self._supplies.forget()
        self._published.clear()
        self._connection.close()


def _sent(state: State | NodeState | None) -> Arrays | Any:
    """A state as a worker receives it: a reference, or its arrays."""
    if isinstance(state, NodeState) and state.reference is not None:
        return state.reference
    return None if state is None else to_arrays(state)


def _node_of(state: State | NodeState | None) -> str | None:
    return state.node if isinstance(state, NodeState) else None


@dataclass
class PlacedWork:
    """The groups of clients of a round, largest first. A worker gets one whose state is on its node, if one is near."""

    groups: dict[int, Sequence[ClientTask]]  # not handed out yet, by position in cohort order
    nodes: Mapping[int, str | None]  # where the state of each is
    assigned: Callable[[Sequence[ClientTask]], NodeJob]
    workers: int
    room: int  # for answers in memory

    @property
    def left(self) -> bool:
        return bool(self.groups)

    def take(self, worker: NodeWorker) -> tuple[int, NodeJob] | None:
        """None: there is no room, or this worker has a job and another one may be free sooner."""
        if not self.room or (worker.assigned and len(self.groups) <= self.workers):
            return None
        near = islice(self.groups, LOOKED_AT if self.room > 1 else 1)  # the first is waited for: the last place is its
        position = min(near, key=lambda p: (self._distance(p, worker), p))
        self.room -= 1
        return position, self.assigned(self.groups.pop(position))

    def _distance(self, position: int, worker: NodeWorker) -> int:
        node = self.nodes.get(position)
        return 0 if node == worker.node.id else 1 if node is None else 2
