"""What every engine can do: run the clients of a round, and count predictions, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch
from fedadc.models.vectors import State, Vector
from fedadc.training.aggregate import PartialSum
from fedadc.training.messages import ClientTask, ServerBroadcast


class Engine(Protocol):
    def run(
        self, broadcast: ServerBroadcast, tasks: Sequence[ClientTask], states: Mapping[int, State]
    ) -> Iterator[PartialSum]:
        """Train each client, from its state if it has one; a part's sum is valid until the next part is asked for."""
        ...

    def count(self, theta: Vector, batches: Sequence[EvaluationBatch]) -> Iterator[BatchCounts]:
        """Count a model's predictions on each batch, in order."""
        ...

    def take_events(self) -> tuple[str, ...]:
        """Events since the last call that a user should know, e.g. a worker that died."""
        ...

    def close(self) -> None:
        """Release processes and memory; the engine may be used again."""
        ...
