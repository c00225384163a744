"""A worker on a node of a cluster. Ray makes it, calls its methods, and ends it with the run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from fedadc.cluster.arrays import Array, Arrays, bytes_of, to_arrays, to_tensors
from fedadc.cluster.node_data import NodeData
from fedadc.engines.failures import Failure, failure_of, failure_to_start
from fedadc.engines.trainer import unpacked
from fedadc.errors import require
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch
from fedadc.models.vectors import canonical
from fedadc.system.determinism import deterministic
from fedadc.system.node_facts import NodeFacts
from fedadc.system.user_code import UserModule, provide_modules
from fedadc.training.aggregate import Facts
from fedadc.training.messages import ClientTask, ServerBroadcast


class RoundJob(NamedTuple):
    """One client, or a whole block of clients without states, whose uploads are added up in the worker."""

    version: int  # of the broadcast
    round: int
    lr: float
    mean_samples: float
    names: tuple[str, ...]  # of the vectors that come with it, theta first
    clients: tuple[tuple[int, int, float], ...]  # client, steps, weight


class RoundAnswer(NamedTuple):
    """What the clients of a job return. The new state of a client is a second answer, which stays on the node."""

    sum: Arrays
    facts: list[Facts]
    state_bytes: int | None  # of the new state; None: there is none


class ClientActor:
    """Trains clients. It keeps nothing of a run but the last broadcast, so it may die at any time."""

    def set_up(
        self,
        expected: NodeFacts | None,
        device: str,
        user_modules: dict[str, UserModule],
        packed: bytes,
        samples: Arrays,
        clients: Any,
    ) -> NodeFacts | Failure:
        """Load what is needed to train, unless this node is not as expected."""
        here = NodeFacts.here()
        if expected is not None and here.differences(expected):
            return here
        try:
            self._stack = ExitStack()
            self._stack.enter_context(deterministic())
            require(device != "cuda" or torch.cuda.is_available(), NO_GPU)
            provide_modules(user_modules)
            self._trainer = unpacked(packed, NodeData(samples, clients), torch.device(device))
        except Exception as error:
            return failure_to_start(error)
        self._broadcast_version = self._evaluated_version = -1
        return here

    def train(self, job: RoundJob, own: Arrays | None, *vectors: Array) -> tuple[RoundAnswer | Failure, Arrays | None]:
        """Train the clients of a job. The first job of a round brings the vectors of the round."""
        try:
            if vectors:  # of a new round; the worker has a copy of its own
                received = to_tensors(dict(zip(job.names, vectors, strict=True)), self._trainer.device)
                theta = received.pop("theta")
                self._broadcast = ServerBroadcast(job.round, job.lr, theta, received, job.mean_samples)
                self._broadcast_version = job.version
            assert job.version == self._broadcast_version
            tasks = [ClientTask(*task) for task in job.clients]
            state = None if own is None else to_tensors(own)
            total, states, facts = self._trainer.train(self._broadcast, tasks, state)
        except Exception as error:
            return failure_of(self._trainer.doing, error), None
        new = to_arrays(canonical(states[0])) if len(states) == 1 and states[0] else None
        return RoundAnswer(to_arrays(total), facts, None if new is None else bytes_of(new)), new

    def count(self, version: int, batch: EvaluationBatch, *theta: Array) -> BatchCounts | Failure:
        """Count predictions. The first job of an evaluation brings the model."""
        try:
            if theta:
                self._evaluated = to_tensors({"theta": theta[0]}, self._trainer.device)["theta"]
                self._evaluated_version = version
            assert version == self._evaluated_version
            return self._trainer.count(self._evaluated, batch)
        except Exception as error:
            return failure_of(self._trainer.doing, error)


NO_GPU = "gpus_per_worker is above 0, but torch finds no CUDA device on a node that offers one to Ray."
