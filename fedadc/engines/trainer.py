"""What a worker does, wherever it runs: it trains clients and adds up their uploads, or counts predictions."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from fedadc.data.dataset import Clients, Samples
from fedadc.engines.simulated import SimulatedClients
from fedadc.errors import FedadcError, one_line
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch, MetricCounter
from fedadc.models.vectors import State, Vector
from fedadc.training.aggregate import Facts, added
from fedadc.training.agreement import Agreement
from fedadc.training.messages import ClientTask, ServerBroadcast


class SampleSource(Protocol):
    """All samples of a simulation, and which client has which."""

    @property
    def clients(self) -> Clients: ...

    def samples(self, split: str) -> Samples: ...


@dataclass
class Trainer:
    """Trains clients one after another; a method sees nothing of it."""

    clients: SimulatedClients
    counter: MetricCounter
    doing: str = ""  # for the message if it fails

    def train(
        self, broadcast: ServerBroadcast, tasks: Sequence[ClientTask], own: State | None
    ) -> tuple[State, list[State], list[Facts]]:
        """The sum of the uploads of one client or of a whole block, the clients' new states, and facts of each.

        `own` is the state of the client; a client that has one is trained singly.
        """
        total: State = {}
        states, facts = [], []
        for task in tasks:
            self.doing = f"round {broadcast.round}, client {task.client}"
            part = self.clients.train(broadcast, task, own)
            (report,) = part.reports
            if report.finite:
                total = part.sum if len(tasks) == 1 else added(total, part.sum)
            states.append(report.state or {} if report.finite else {})
            facts.append(report.facts)
        return total, states, facts

    def count(self, theta: Vector, batch: EvaluationBatch) -> BatchCounts:
        self.doing = f"the evaluation on {batch.split} data"
        return self.counter.count(theta, batch)

    @property
    def device(self) -> torch.device:
        return self.clients.agreement.model.device


def packed(agreement: Agreement, counter: MetricCounter, dumps: Callable[[object], bytes] = pickle.dumps) -> bytes:
    """What a trainer is built from in another process; samples are not part of it."""
    splits = {name: _empty(samples) for name, samples in counter.splits.items()}
    try:
        agreement = replace(agreement, start=agreement.start[:0])  # workers need no initial weights
        return dumps((agreement, replace(counter, splits=splits)))
    except Exception as error:
        raise FedadcError(
            "workers need a model, a method and an objective that can be sent to another process "
            f"({one_line(error)}): define them in a file, without lambdas; workers=0 works without."
        ) from error


def unpacked(content: bytes, data: SampleSource, device: torch.device) -> Trainer:
    """A trainer from `packed`; the content comes from our own parent process."""
    agreement, counter = pickle.loads(content)
    model, inputs = agreement.model.on(device), replace(agreement.inputs, device=device)
    clients = SimulatedClients(replace(agreement, model=model, inputs=inputs), data.samples("train"), data.clients)
    splits = {name: data.samples(name) for name in counter.splits}
    return Trainer(clients, replace(counter, model=model, inputs=inputs, splits=splits))


def _empty(samples: Samples) -> Samples:
    return samples.take(np.zeros(0, dtype=np.int64))
