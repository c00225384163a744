"""An engine over a pool of workers: clients are handed out as workers become free, and sums come back in order."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from fedadc.evaluation.metrics import BatchCounts

log = logging.getLogger("fedadc")
AHEAD = 2  # jobs that a worker has at a time, so that it never waits for the next
Worker = TypeVar("Worker")
Taker = TypeVar("Taker", contravariant=True)


class Numbered(Protocol):
    """A job that was handed out."""

    @property
    def number(self) -> int: ...


class Pool(Protocol[Worker]):
    """Workers, and the answers that are not taken yet, by the numbers of their jobs."""

    answers: dict[int, Any]
    events: EventLog

    def idlest(self, limit: int = AHEAD) -> Worker | None:
        """The worker with the fewest jobs, if it has fewer than the limit."""
        ...

    def give(self, worker: Worker, assignment: Any) -> None: ...

    def receive(self) -> None:
        """Wait for answers."""
        ...

    def forget_counting(self) -> None:
        """Give up repeating the jobs of an evaluation that is no longer waited for."""
        ...

    def close(self) -> None: ...


class Work(Protocol[Taker]):
    """The jobs of a round that are not handed out yet."""

    @property
    def left(self) -> bool: ...

    def take(self, worker: Taker) -> tuple[int, Numbered] | None:
        """A job for a worker, and its position in cohort order; None if no more answers have room in memory."""
        ...


class EventLog:
    """What a user should know about the workers, until it is taken."""

    def __init__(self) -> None:
        self._events: list[str] = []

    def record(self, event: str) -> None:
        log.warning(event)
        self._events.append(event)

    def take(self) -> tuple[str, ...]:
        events, self._events = tuple(self._events), []
        return events


def training_in_words(round: int, clients: Sequence[tuple[int, int, float]]) -> str:
    """What a worker was doing: the round and the clients of its job."""
    return f" in round {round}, client {' or '.join(str(client) for client, *_ in clients)}"


COUNTING_IN_WORDS = " during the evaluation"


class PooledEngine(ABC, Generic[Worker]):
    """The part of an engine that all pools share: who gets the next job, and the order of the answers."""

    def __init__(self, pool: Pool[Worker]) -> None:
        self._pool = pool
        self._to_count: deque[Any] = deque()  # jobs of the present evaluation
        self._counting: deque[int] = deque()  # numbers of its jobs that were handed out

    @abstractmethod
    def _counting_assignment(self, job: Any) -> Numbered:
        """A job of an evaluation, as the pool takes it."""

    def _trained(self, work: Work[Worker]) -> Generator[Any, None, None]:
        """The answers in cohort order, while the workers are kept busy."""
        pool, position = self._pool, 0
        given: dict[int, int] = {}  # position -> number of the job
        with self._closing_on_failure():
            while work.left or given:
                while work.left and (worker := pool.idlest()) and (taken := work.take(worker)):
                    given[taken[0]] = taken[1].number
                    pool.give(worker, taken[1])
                while not work.left and self._to_count and (worker := pool.idlest(AHEAD - 1)):
                    self._give_count(worker)
                if given.get(position) in pool.answers:
                    yield pool.answers.pop(given.pop(position))
                    position += 1
                else:
                    pool.receive()

    def _counted(self) -> Iterator[BatchCounts]:
        pool = self._pool
        with self._closing_on_failure():
            while self._to_count or self._counting:
                while self._to_count and (worker := pool.idlest()):
                    self._give_count(worker)
                if self._counting and self._counting[0] in pool.answers:
                    yield pool.answers.pop(self._counting.popleft())
                else:
                    pool.receive()

    def _give_count(self, worker: Worker) -> None:
        assignment = self._counting_assignment(self._to_count.popleft())
        self._counting.append(assignment.number)
        self._pool.give(worker, assignment)

    def _start_counting(self, jobs: Iterator[Any]) -> Iterator[BatchCounts]:
        """Begin an evaluation. Workers without a client to train count even before the counts are asked for."""
        self._pool.forget_counting()  # of another evaluation
        for number in self._counting:
            self._pool.answers.pop(number, None)
        self._to_count, self._counting = deque(jobs), deque()
        return self._counted()

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # also when the consumer stops early: what the workers still do is of no use
            self.close()
            raise

    def take_events(self) -> tuple[str, ...]:
        return self._pool.events.take()

    def close(self) -> None:
        self._pool.close()
        self._to_count.clear()
        self._counting.clear()
