"""A federation: a model, clients with data, a method, and how they work together. It holds no state of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedadc.communication.clock import Clock
from fedadc.communication.network import Communication
from fedadc.data.batches import Augment
from fedadc.data.dataset import Clients, Dataset
from fedadc.data.roster import Roster
from fedadc.data.shares import local_shares, shares_by_name
from fedadc.engines import InProcess
from fedadc.engines.base import Engine
from fedadc.engines.simulated import SimulatedClients
from fedadc.errors import article, require
from fedadc.evaluation.evaluator import Evaluator, models_of, until
from fedadc.evaluation.metrics import Evaluation, MetricCounter
from fedadc.methods import FedAvg, Method
from fedadc.models.flat import FlatModel
from fedadc.objectives import Objective
from fedadc.partitions import IID, Natural, Partition, deal, default_partition
from fedadc.rng import generator
from fedadc.schedules import Schedule
from fedadc.selections import Selection, Uniform
from fedadc.system.determinism import resolve_device, resolve_workers
from fedadc.training.agreement import agree
from fedadc.training.client_states import Storage
from fedadc.training.coordinator import Coordinator, Weighting
from fedadc.training.ensembles import Ensembles
from fedadc.training.faults import Faults
from fedadc.training.rounds import train, with_events
from fedadc.training.server import Server
from fedadc.training.state import Round, RunState
from fedadc.views.local_work import LocalWork


class Federation:
    """Clients that train one model. `rounds(n)` yields a `Round` after each of n rounds."""

    def __init__(
        self,
        *,
        model: nn.Module,
        data: Dataset,
        method: Method | None = None,
        local: LocalWork | None = None,
        clients: int | None = None,  # how many clients the data is dealt to; None for natural clients
        partition_by: Partition | None = None,  # None: the data's own clients, else iid
        cohort: int | float | None = None,  # clients per round, as a number or as a share; None: all
        selection: Selection | None = None,  # None: uniform
        weighting: Weighting = "uniform",
        augment: Augment | None = None,
        evaluation: Evaluation | None = None,
        storage: Storage | None = None,
        faults: Faults | None = None,
        ensembles: Ensembles | None = None,
        communication: Communication | None = None,
        clock: Clock | None = None,
        seed: int = 0,
        data_seed: int | None = None,
        device: str | torch.device = "cpu",
        channels_last: bool | None = None,  # memory format of images; None: the faster one
        workers: int | str = 0,  # processes that train clients, or "auto"; 0: this process
    ) -> None:
        self.data, self.seed = data, seed
        self._data_seed = seed if data_seed is None else data_seed
        self.evaluation, self.storage = evaluation or Evaluation(), storage or Storage()
        communication = communication or Communication()
        server = Server(FedAvg() if method is None else method, ensembles or Ensembles())
        work, augment = local or LocalWork(), augment or Augment()
        _require_types(
            (model, nn.Module, "model"),
            (data, Dataset, "data"),
            (server.method, Method, "method"),
            (getattr(server.method, "objective", None), Objective, "method.objective"),
            (work, LocalWork, "local"),
            (getattr(work, "schedule", None), Schedule, "local.schedule"),
            (augment, Augment, "augment"),
            (self.evaluation, Evaluation, "evaluation"),
            (partition_by or IID(), Partition, "partition_by"),
            (self.storage, Storage, "storage"),
            (faults or Faults(), Faults, "faults"),
            (selection or Uniform(), Selection, "selection"),
            (server.ensembles, Ensembles, "ensembles"),
            (communication, Communication, "communication"),
            (clock or Clock(), Clock, "clock"),
            (seed, int, "seed"),
        )
        self.clients = deal(data, partition_by, clients, self._data_seed)
        self._natural = isinstance(partition_by or default_partition(data, clients), Natural)
        self.agreement = agree(
            model,
            data.spec,
            server,
            work=work,
            augment=augment,
            uplink=communication.uplink,
            seed=seed,
            channels_last=channels_last,
            device=resolve_device(str(device)),
            samples=data.train,
        )
        self.coordinator = Coordinator(
            self.agreement,
            self._roster(),
            cohort=cohort,
            selection=selection,
            weighting=weighting,
            faults=faults,
            downlink=communication.downlink,
            clock=clock,
        )
        self.workers = resolve_workers(workers, str(device))
        self._build_engine()

    def _roster(self) -> Roster:
        """What the server of this federation knows about its clients."""
        data, clients = self.data, self.clients
        names = np.unique(data.owners) if self._natural and data.owners is not None else None
        return Roster(clients.sizes, names, lambda: clients.class_counts(data.train.y, len(data.classes)))

    def _build_engine(self) -> None:
        """Build the engine that runs the clients; with workers, data goes to shared memory."""
        shared = None
        if self.workers:
            from fedadc.engines.workers import Workers, share_data

            shared = share_data(self.data, self.clients)
            self.data, self.clients = shared.dataset(self.data), shared.clients
        splits = {name: samples for name, samples in self.data.splits().items() if name != "train"}
        agreement = self.agreement
        self.counter = MetricCounter(self.model, splits, agreement.inputs, agreement.classes, self.evaluation)
        self.simulated = SimulatedClients(agreement, self.data.train, self.clients)
        self.engine: Engine = InProcess(self.simulated, self.counter)
        if shared is not None:
            server = agreement.server.start(agreement.start)
            vectors = {name: server[name] for name in self.coordinator.downlink}
            self.engine = Workers(agreement, self.counter, shared, self.workers, vectors)

    @property
    def method(self) -> Method:
        return self.agreement.method

    @property
    def model(self) -> FlatModel:
        return self.agreement.model

    def close(self) -> None:
        """End the worker processes, if there are any; they are started again when they are needed."""
        self.engine.close()

    @property
    def evaluator(self) -> Evaluator:
        shares = self._local_shares if self.method.personalized else {}
        ensembles = self.agreement.server.ensembles
        return Evaluator(self.method, ensembles, len(self.clients), self.counter, self.engine.count, shares)

    @property
    def client_names(self) -> tuple[str, ...]:
        """The names of the clients in the data, or else their numbers."""
        return self.coordinator.roster.names

    @property
    def local_tests(self) -> Clients:
        """Each client's share of the test samples: those that name it, or else in proportion to its labels."""
        require("test" in self._local_shares, f"data {self.data.name} has no test samples to share out.")
        return self._local_shares["test"]

    @cached_property
    def _local_shares(self) -> dict[str, Clients]:
        """Each client's share of every split except training."""
        counts = self.clients.class_counts(self.data.train.y, len(self.data.classes))
        shares = {}
        for name, samples in self.counter.splits.items():
            owners = getattr(self.data, f"{name}_owners")
            if self._natural and owners is not None:
                shares[name] = shares_by_name(owners, self.client_names)
                continue
            rng = generator(self._data_seed, f"local {name} shares")
            shares[name] = local_shares(samples.y.numpy(), counts, rng)
        return shares

    def start(self) -> RunState:
        """The state before the first round."""
        return self.coordinator.start(self.storage)

    def rounds(
        self,
        rounds: int,
        start: RunState | None = None,
        stop_at_accuracy: float | None = None,
        trusted: bool = False,
    ) -> Iterator[Round]:
        """Train up to round `rounds`, from the beginning or from a state of an earlier round.

        Unless a state is `trusted`, it is checked to fit this federation.
        """
        first = self.start() if start is None else start
        require(
            isinstance(first, RunState), f"start must be a RunState (a Round's .state), not a {type(first).__name__}."
        )
        require(
            trusted or self.coordinator.fits(first),
            "start is the state of another model or method; pass a state of this federation.",
        )
        require(
            isinstance(rounds, int) and rounds >= max(1, first.round),
            f"rounds must be a whole number, at least {max(1, first.round)}, not {rounds!r}.",
        )
        folder = self.storage.folder
        require(folder is None or Path(folder).is_dir(), f"storage.folder: there is no folder {folder}.")
        require(
            stop_at_accuracy is None or 0 < stop_at_accuracy <= 1,
            f"stop_at_accuracy must be in (0, 1], not {stop_at_accuracy}.",
        )
        first = replace(first, clients=first.clients.kept_in(self.storage))
        evaluated = self.evaluator.follow(train(self.coordinator, self.engine.run, rounds, first), rounds)
        return until(with_events(evaluated, self.engine.take_events), stop_at_accuracy)

    def load_state_dict(self, state: dict[str, torch.Tensor], source: str) -> None:
        """Start from given weights instead of the module's own."""
        self.model.load_state_dict(state, source)
        self.agreement.start.copy_(self.model.theta)
        self.engine.close()  # workers have the old weights

    def state_dict(self, state: RunState) -> dict[str, torch.Tensor]:
        """The judged model of a state, for `load_state_dict` of your own module."""
        require(self.method.federated, f"{type(self.method).__name__} has no global model; see state.clients.")
        return next(iter(self.models(state).values()))

    def models(self, state: RunState) -> dict[str, dict[str, torch.Tensor]]:
        """The state dicts of all models of a state by name, first the judged one."""
        return {name: self.model.state_dict(vector) for name, vector in self.vectors(state).items()}

    def vectors(self, state: RunState) -> dict[str, torch.Tensor]:
        """All models of a state as flat vectors, first the judged one."""
        return models_of(self.method, self.agreement.server.ensembles, state)


def _require_types(*arguments: tuple[Any, type, str]) -> None:
    """Check the types of arguments before any of them is used."""
    for value, kind, name in arguments:
        require(isinstance(value, kind), f"{name} must be {article(kind)}, not {value!r:.60}.")
