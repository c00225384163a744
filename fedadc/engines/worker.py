"""What a worker process does: local updates and counts, one job after another, and nothing else."""

from __future__ import annotations

import gc
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedadc.engines.failures import failure_of, failure_to_start
from fedadc.engines.shared_data import SharedData
from fedadc.engines.shared_memory import Parcel, SharedTensors, Slots
from fedadc.engines.trainer import Trainer, unpacked
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch
from fedadc.system.determinism import deterministic
from fedadc.system.memory import give_memory_back
from fedadc.system.user_code import UserModule, provide_modules
from fedadc.training.aggregate import Facts
from fedadc.training.messages import ClientTask, ServerBroadcast

EVALUATED = "evaluated"  # the published model that is evaluated
READY = "ready"  # the first message of a worker
IDLE = 0.01  # seconds


class TrainingJob(NamedTuple):
    """One client, or a whole block of clients without states, whose uploads are added up in the worker."""

    version: int  # of the broadcast, which is in shared memory
    round: int
    lr: float
    mean_samples: float
    clients: tuple[tuple[int, int, float], ...]  # client, steps, weight
    slot: int  # where the sum and the clients' new states are written
    state: Parcel | None  # of a single client

    @property
    def is_large(self) -> bool:
        return isinstance(self.state, bytes)


class CountingJob(NamedTuple):
    version: int  # of the model that is evaluated
    batch: EvaluationBatch


class TrainingAnswer(NamedTuple):
    """What the clients of a job return."""

    slot: int
    sum: Parcel
    states: list[Parcel]  # of each client
    facts: list[Facts]  # of each client


@dataclass
class WorkerSetup:
    """What a worker receives once, when it is started."""

    user_modules: dict[str, UserModule]  # a user's own classes come from them
    packed: bytes  # what a trainer is built from, without data
    data: SharedData
    published: SharedTensors  # theta and the downlink vectors of the round; the model that is evaluated
    slots: Slots


@dataclass
class _Worker:
    trainer: Trainer
    slots: Slots
    published: dict[str, Tensor]
    broadcast_version: int = -1
    broadcast: ServerBroadcast = field(init=False)
    evaluated_version: int = -1
    evaluated: Tensor = field(init=False)

    def train(self, job: TrainingJob) -> TrainingAnswer:
        if job.version != self.broadcast_version:  # a copy of its own, once a round
            vectors = {n: self._copied(v) for n, v in self.published.items() if n != EVALUATED}
            theta = vectors.pop("theta")
            self.broadcast = ServerBroadcast(job.round, job.lr, theta, vectors, job.mean_samples)
            self.broadcast_version = job.version
        own = None  # a client that has a state is a job of its own
        if job.state is not None:
            own = {name: v.clone() for name, v in self.slots.get(job.state).items()}
        total, states, facts = self.trainer.train(self.broadcast, [ClientTask(*task) for task in job.clients], own)
        where, *kept = self.slots.put(job.slot, total, *states)
        return TrainingAnswer(job.slot, where, kept, facts)

    def count(self, job: CountingJob) -> BatchCounts:
        if job.version != self.evaluated_version:
            self.evaluated, self.evaluated_version = self._copied(self.published[EVALUATED]), job.version
        return self.trainer.count(self.evaluated, job.batch)

    def _copied(self, vector: Tensor) -> Tensor:
        return vector.to(self.trainer.device, copy=True)


def serve(pipe: Connection, setup: WorkerSetup, device: torch.device) -> None:
    """The whole life of a worker: it ends with its parent, whose end of the pipe is then closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    gc.freeze()  # a collection would touch, and so copy, all that was forked
    try:
        worker = _set_up(setup, device)
    except Exception as error:
        pipe.send(failure_to_start(error))
        return
    with deterministic():
        with suppress(OSError):
            pipe.send(READY)
        while True:
            if not pipe.poll(IDLE):
                give_memory_back()
            try:
                job: Any = pipe.recv()
            except (EOFError, OSError):  # the parent is gone
                return
            try:
                answer: Any = worker.train(job) if isinstance(job, TrainingJob) else worker.count(job)
            except Exception as error:
                answer = failure_of(worker.trainer.doing, error)
            with suppress(OSError):
                pipe.send(answer)


def _set_up(setup: WorkerSetup, device: torch.device) -> _Worker:
    provide_modules(setup.user_modules)
    trainer = unpacked(setup.packed, setup.data, device)
    setup.packed = b""  # it may be large
    return _Worker(trainer, setup.slots, setup.published.views())
