"""Workers on the nodes of a cluster: started where there is room, replaced when they die, also on nodes that join.

Ray places and connects. What is lost is handed out again here, because Ray's own retries would not keep our order.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedadc.cluster.actor import ClientActor, RoundAnswer, RoundJob
from fedadc.cluster.admission import Admission
from fedadc.cluster.connection import Connection, Node, import_ray, on_node
from fedadc.cluster.supplies import Supplies
from fedadc.engines.failures import Failure, error_of
from fedadc.engines.pool import MOST_DEATHS
from fedadc.engines.pooled import AHEAD, COUNTING_IN_WORDS, EventLog, training_in_words
from fedadc.errors import FedadcError, StatesLost, WorkersLost, one_line, require
from fedadc.evaluation.metrics import EvaluationBatch
from fedadc.models.vectors import DistantState, State
from fedadc.system.node_facts import NodeFacts

log = logging.getLogger("fedadc")
POLL = 1.0  # seconds after which a wait looks at the cluster again


class NodeState(DistantState):
    """A client's state in the object store of the node on which the client was trained last."""

    def __init__(self, reference: Any, node: str, size: int, fetched: Callable[[Any], State]) -> None:
        self.reference, self.node, self.size, self._fetched = reference, node, size, fetched
        self._here: State | None = None

    def fetch(self) -> State:
        return self._fetched(self.reference) if self._here is None else self._here

    def bring_here(self) -> None:
        """Keep the tensors in this process, if they are not lost; the cluster is about to be left."""
        with suppress(StatesLost):
            self._here = self.fetch()
        self.give_up()

    def give_up(self) -> None:
        """Forget where the tensors are: another session of Ray would not know the reference."""
        self.reference = None


class CountJob(NamedTuple):
    """A batch of an evaluation."""

    version: int  # of the model
    batch: EvaluationBatch
    theta: Any  # a reference


@dataclass(eq=False)
class NodeJob:
    """A job that was handed out, and what is needed to do it again."""

    number: int
    job: RoundJob | CountJob
    state: Any = None  # of its client: a reference or arrays
    vectors: tuple[Any, ...] = ()  # references
    deaths: int = 0  # of workers that were busy with it


class PlacedAnswer(NamedTuple):
    """An answer, and where the new state of its client is."""

    answer: RoundAnswer
    state: Any  # a reference
    node: str


@dataclass(eq=False)
class NodeWorker:
    """An actor, and the jobs that it has."""

    number: int
    node: Node
    actor: Any
    born: float
    starting: Any  # the reference of its first answer; None: it is ready
    broadcast: int = -1  # version of the broadcast that it has
    evaluated: int = -1  # version of the evaluated model that it has
    assigned: deque[tuple[NodeJob, Any, Any]] = field(default_factory=deque)  # with the references of two answers

    def __str__(self) -> str:
        return f"worker {self.number} on node {self.node}"


class ActorPool:
    """Actors on the nodes of a cluster. Answers are kept under the number of their job until they are taken."""

    def __init__(self, connection: Connection, device: str, supplies: Supplies) -> None:
        self.answers: dict[int, Any] = {}
        self._connection, self._settings = connection, connection.settings
        self._device, self._supplies = device, supplies
        self._workers: list[NodeWorker] = []
        self._admission = Admission(self._settings)
        self._seen: set[str] = set()  # nodes
        self._jobs = self._born = 0
        self._again: deque[NodeJob] = deque()
        self._deaths = 0  # since the last answer
        self._looked = -math.inf  # when the nodes were looked at last
        self._is_checked = False  # the first workers have said what their nodes are
        self.events = EventLog()

    @property
    def count(self) -> int:
        return len(self._workers)

    def assignment(self, job: RoundJob | CountJob, state: Any = None, vectors: tuple[Any, ...] = ()) -> NodeJob:
        self._jobs += 1
        return NodeJob(self._jobs, job, state, vectors)

    def refresh(self) -> None:
        """Start workers where there is room: at first, in the place of lost ones, and on nodes that have joined.

        The first workers are waited for, so that nodes with other bits are refused before anything is trained.
        """
        ray, until = import_ray(), time.monotonic() + self._settings.patience
        nodes = self._look_around()
        if not self._workers:
            log.warning(
                "%s; nodes may join within patience=%g seconds", self._too_small(nodes), self._settings.patience
            )
        while not self._workers or (self._starting() and not self._is_checked):
            if time.monotonic() > until:
                require(bool(self._workers), f"{self._too_small(nodes)}.", WorkersLost)
                break
            if starting := self._starting():
                for reference in ray.wait(list(starting), timeout=POLL)[0]:
                    self._take(starting[reference], reference)
            else:
                time.sleep(POLL)
            nodes = self._look_around()
        if not self._is_checked and self._settings.workers != "auto" and self.count < self._settings.most_workers:
            self.events.record(f"the cluster has room for {self.count} of the {self._settings.workers} workers")
        self._is_checked = True

    def _look_around(self) -> list[Node]:
        """Remove workers whose node is gone and those that do not start, and start workers where there is room."""
        self._looked = now = time.monotonic()
        nodes, patience = self._connection.nodes(), self._settings.patience
        alive = {node.id for node in nodes}
        for worker in list(self._workers):
            if worker.node.id not in alive:  # Ray may take long to say so
                self._lose(worker, ConnectionError("its node is gone"))
            elif worker.starting is not None and now - worker.born > patience:
                self._lose(worker, TimeoutError(f"it has not started within patience={patience:g} seconds"))
        for node in nodes if self._seen else ():
            if node.id not in self._seen:
                self.events.record(f"node {node} has joined the cluster")
        self._seen |= alive
        self._start_on(self._with_room(nodes))
        return nodes

    def _starting(self) -> dict[Any, NodeWorker]:
        return {worker.starting: worker for worker in self._workers if worker.starting is not None}

    def _too_small(self, nodes: Sequence[Node]) -> str:
        offered = "; ".join(
            f"{node} with {node.cpus:g} CPUs, {node.free_cpus:g} of them free, and {node.gpus:g} GPUs" for node in nodes
        )
        need = f"{self._settings.cpus_per_worker:g} CPUs and {self._settings.gpus_per_worker:g} GPUs"
        different = len(self._admission.left_out)
        left_out = f" ({different} are left out because they differ)" if different else ""
        is_occupied = any(node.room(self._settings) for node in nodes)
        occupied = "; another program, or a federation that is not closed, may have the rest" if is_occupied else ""
        return (
            f"no node of the Ray cluster has room for a worker, which needs {need}: {offered or 'there is none'}"
            f"{left_out}{occupied}"
        )

    def _with_room(self, nodes: Sequence[Node]) -> list[Node]:
        """The node of every worker that can be started: always the one with the most room, so that loads are equal."""
        settings, busy = self._settings, Counter(worker.node.id for worker in self._workers)
        nodes = self._admission.usable(nodes)
        room = {node: node.free_room(settings, busy[node.id]) for node in nodes}
        chosen: list[Node] = []
        for _ in range(settings.most_workers - len(self._workers)):
            node = max(room, key=lambda node: room[node], default=None)
            if node is None or room[node] <= 0:
                break
            room[node] -= 1
            chosen.append(node)
        return chosen

    def _start_on(self, chosen: Sequence[Node]) -> None:
        for event in self._supplies.provide(chosen):
            self.events.record(event)
        self._workers += [self._start(node) for node in chosen]

    def _start(self, node: Node) -> NodeWorker:
        ray, settings = import_ray(), self._settings
        self._born += 1
        actor = ray.remote(
            num_cpus=settings.cpus_per_worker, num_gpus=settings.gpus_per_worker, max_restarts=0, max_task_retries=0,
            scheduling_strategy=on_node(node.id),
        )(ClientActor).remote()  # fmt: skip
        starting = actor.set_up.remote(self._admission.expected, self._device, *self._supplies.of(node))
        return NodeWorker(self._born, node, actor, time.monotonic(), starting)

    def idlest(self, limit: int = AHEAD) -> NodeWorker | None:
        """The worker with the fewest jobs, if it has fewer than the limit, among those that have started."""
        ready = [worker for worker in self._workers if worker.starting is None]
        worker = min(ready, key=lambda w: len(w.assigned), default=None)
        return worker if worker is not None and len(worker.assigned) < limit else None

    def give(self, worker: NodeWorker, assignment: NodeJob) -> None:
        """Call a worker. Vectors go with the first job that needs them: every reference costs a job a millisecond."""
        job, state = assignment.job, None
        if isinstance(job, CountJob):
            theta = () if worker.evaluated == job.version else (job.theta,)
            answer = worker.actor.count.remote(job.version, job.batch, *theta)
            worker.evaluated = job.version
        else:
            vectors = () if worker.broadcast == job.version else assignment.vectors
            answer, state = worker.actor.train.options(num_returns=2).remote(job, assignment.state, *vectors)
            worker.broadcast = job.version
        worker.assigned.append((assignment, answer, state))

    def receive(self) -> None:
        """Wait for answers, but at most for a moment. Every worker answers in the order of its jobs."""
        ray = import_ray()
        if not self._workers or time.monotonic() - self._looked > 2 * POLL:
            self.refresh()
        while self._again and (free := self.idlest()):
            self.give(free, self._again.popleft())
        first = {worker.assigned[0][1]: worker for worker in self._workers if worker.assigned}
        first |= self._starting()
        ready, _ = ray.wait(list(first), num_returns=1, timeout=POLL) if first else ([], [])
        for reference in ready:
            self._take(first[reference], reference)

    def _take(self, worker: NodeWorker, reference: Any) -> None:
        ray = import_ray()
        if worker not in self._workers:  # its node is left out
            return
        try:
            answer = ray.get(reference, timeout=self._settings.patience)
        except ray.exceptions.RayError as error:  # it died, its node did, or its answer or a state is lost
            cause = getattr(error, "cause", None) or error
            if isinstance(error, ray.exceptions.RayTaskError) and not isinstance(cause, ray.exceptions.RayError):
                raise FedadcError(f"{worker} failed ({one_line(cause):.300}).") from error
            self._connection.nodes()  # an error if the head is lost: without it, the next call would not return
            self._lose(worker, cause)
        else:
            self._accept(worker, reference, answer)

    def _accept(self, worker: NodeWorker, reference: Any, answer: Any) -> None:
        if isinstance(answer, Failure):
            raise error_of(answer)
        if reference == worker.starting:
            worker.starting = None
            self._check(worker, answer)
            return
        assignment, _, state = worker.assigned.popleft()
        if isinstance(answer, RoundAnswer):
            answer = PlacedAnswer(answer, state, worker.node.id)
        self.answers[assignment.number] = answer
        self._deaths = 0

    def _check(self, worker: NodeWorker, facts: NodeFacts) -> None:
        """Nodes that may compute other bits are refused or left out, as the settings say; later ones are left out."""
        problem = self._admission.problem(worker.node, facts, may_refuse=not self._is_checked)
        if problem:
            self.events.record(problem)
            for other in [w for w in self._workers if w.node.id == worker.node.id]:
                self._remove(other)

    def _lose(self, worker: NodeWorker, error: Exception) -> None:
        """Hand out again what a lost worker has not answered. Another one is started where there is room."""
        busy = worker.assigned[0][0] if worker.assigned else None
        if busy is not None and busy.state is not None and isinstance(error, import_ray().exceptions.ObjectLostError):
            raise StatesLost(f"the state of a client is lost with its node ({_reason(error)}).")
        self.events.record(f"{worker} was lost{_described(busy)} ({_reason(error)}); others repeat its work")
        if type(error).__name__ in UNREACHABLE:  # this is no fault of the job
            self._admission.avoid(worker.node)
        else:
            self._count_death(worker, busy, error)
        self._again.extendleft(assignment for assignment, _, _ in reversed(worker.assigned))
        self._remove(worker)
        self._looked = -math.inf  # look for room at once

    def _count_death(self, worker: NodeWorker, busy: NodeJob | None, error: Exception) -> None:
        self._deaths += 1
        if busy is not None:
            busy.deaths += 1
        if (busy is not None and busy.deaths >= MOST_DEATHS) or self._deaths >= MOST_DEATHS * len(self._workers):
            raise WorkersLost(
                f"{self._deaths} workers were lost one after another, the last {worker}: {_reason(error)}."
            )

    def _remove(self, worker: NodeWorker) -> None:
        self._workers.remove(worker)
        self._kill(worker)

    def _kill(self, worker: NodeWorker) -> None:
        ray = import_ray()
        if ray.is_initialized() and not self._connection.head_lost:
            with suppress(ray.exceptions.RayError, ValueError):  # it is gone already
                ray.kill(worker.actor)

    def forget_counting(self) -> None:
        self._again = deque(job for job in self._again if isinstance(job.job, RoundJob))

    def close(self) -> None:
        workers, self._workers = self._workers, []
        self.answers.clear()
        self._again.clear()
        self._seen.clear()
        self._deaths, self._is_checked = 0, False
        for worker in workers:
            self._kill(worker)


def _described(busy: NodeJob | None) -> str:
    """What a worker was doing."""
    if busy is None:
        return ""
    return COUNTING_IN_WORDS if isinstance(busy.job, CountJob) else training_in_words(busy.job.round, busy.job.clients)


UNREACHABLE = ("ActorUnavailableError", "ActorUnschedulableError", "ConnectionError")
REASONS = {  # by the name of Ray's exception, whose message has pages
    "ActorDiedError": "its process died",
    "ActorUnavailableError": "it cannot be reached",
    "ActorUnschedulableError": "its node is gone",
    "GetTimeoutError": "its answer did not come in time",
}


def _reason(error: Exception) -> str:
    name = type(error).__name__
    return REASONS.get(name, one_line(error) if isinstance(error, OSError) else name)
