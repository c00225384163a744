"""Clients one after another in this process: breakpoints work and tracebacks are complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedadc.engines.simulated import SimulatedClients
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch, MetricCounter
from fedadc.models.vectors import State, Vector
from fedadc.system.determinism import deterministic
from fedadc.training.aggregate import PartialSum
from fedadc.training.messages import ClientTask, ServerBroadcast


@dataclass(frozen=True)
class InProcess:
    clients: SimulatedClients
    counter: MetricCounter

    def run(
        self, broadcast: ServerBroadcast, tasks: Sequence[ClientTask], states: Mapping[int, State]
    ) -> Iterator[PartialSum]:
        for task in tasks:
            try:
                part = self.clients.train(broadcast, task, states.get(task.client))
            except Exception as error:
                error.add_note(f"in round {broadcast.round}, client {task.client}")
                raise
            yield part

    def count(self, theta: Vector, batches: Sequence[EvaluationBatch]) -> Iterator[BatchCounts]:
        with deterministic():
            yield from (self.counter.count(theta, batch) for batch in batches)

    def take_events(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        pass
