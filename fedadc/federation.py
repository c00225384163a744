"""A federation: a model, clients with data, a method, and how they work together. It holds no state of a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedadc.communication.clock import Clock
from fedadc.communication.ledger import sizes
from fedadc.communication.network import Communication, Network
from fedadc.data.batches import Augment, Inputs
from fedadc.data.dataset import Clients, Dataset
from fedadc.data.shares import local_shares, shares_by_name
from fedadc.engines import InProcess
from fedadc.engines.base import Engine
from fedadc.errors import article, require
from fedadc.evaluation.evaluator import Evaluator, models_of, until
from fedadc.evaluation.metrics import Evaluation, MetricCounter
from fedadc.methods import FedAvg, Method
from fedadc.models.build import prefers_channels_last, probe
from fedadc.models.flat import FlatModel
from fedadc.objectives import Objective
from fedadc.partitions import IID, Natural, Partition, deal, default_partition
from fedadc.rng import generator
from fedadc.schedules import Schedule
from fedadc.selections import Selection, Uniform
from fedadc.selections.cohorts import Cohorts
from fedadc.system.determinism import resolve_device, resolve_workers
from fedadc.training.client_states import ClientStates, Storage, Store
from fedadc.training.ensembles import Ensembles
from fedadc.training.faults import Faults
from fedadc.training.local import ClientContext
from fedadc.training.replica import ServerReplica
from fedadc.training.rounds import Training, Weighting, train, with_events
from fedadc.training.server import Server
from fedadc.training.state import Round, RunState
from fedadc.views.local_work import LocalWork
from fedadc.views.setup import Setup


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
        self.method = FedAvg() if method is None else method
        self.local, self.augment = local or LocalWork(), augment or Augment()
        self.evaluation, self.storage = evaluation or Evaluation(), storage or Storage()
        self.faults, self.selection = faults or Faults(), selection or Uniform()
        self.communication, self.clock = communication or Communication(), clock
        self.ensembles, self.weighting = ensembles or Ensembles(), weighting
        self.data, self.seed = data, seed
        self._data_seed = seed if data_seed is None else data_seed
        self._check_arguments(model, partition_by)
        self._deal(partition_by, clients, cohort)
        self._build_model(model, channels_last, torch.device(resolve_device(str(device))))
        self.server = Server(self.method, self.ensembles)
        self._check_settings()
        self.workers = resolve_workers(workers, str(device))
        self._build_engine()

    def _check_arguments(self, model: nn.Module, partition_by: Partition | None) -> None:
        """Check that every argument has the right type and is possible for this data."""
        _require_types(
            (model, nn.Module, "model"),
            (self.data, Dataset, "data"),
            (self.method, Method, "method"),
            (getattr(self.method, "objective", None), Objective, "method.objective"),
            (self.local, LocalWork, "local"),
            (getattr(self.local, "schedule", None), Schedule, "local.schedule"),
            (self.augment, Augment, "augment"),
            (self.evaluation, Evaluation, "evaluation"),
            (partition_by or IID(), Partition, "partition_by"),
            (self.storage, Storage, "storage"),
            (self.faults, Faults, "faults"),
            (self.selection, Selection, "selection"),
            (self.ensembles, Ensembles, "ensembles"),
            (self.communication, Communication, "communication"),
            (self.clock or Clock(), Clock, "clock"),
            (self.seed, int, "seed"),
        )
        require(
            self.weighting in ("uniform", "samples"), f"weighting must be uniform or samples, not {self.weighting!r}."
        )
        shape, augment = list(self.data.input_shape), self.augment
        require(
            not augment or len(shape) == 3,
            f"data.augment needs images [channels, height, width], not inputs of shape {shape}.",
        )
        require(
            not augment or augment.crop <= min(shape[1:]),
            f"data.augment.crop is {augment.crop}, more than the images' {shape[1:]} pixels.",
        )

    def _deal(self, rule: Partition | None, clients: int | None, cohort: int | float | None) -> None:
        """Decide which samples each client has, and which clients take part in each round."""
        data = self.data
        self.clients = held = deal(data, rule, clients, self._data_seed)
        self._natural = isinstance(rule or default_partition(data, clients), Natural)
        self.cohort = _cohort_size(cohort, len(held))
        self.select = Cohorts(
            self.selection,
            len(held),
            self.cohort,
            lambda: held.class_counts(data.train.y, len(data.classes)),
            self.seed,
        )

    def _build_model(self, model: nn.Module, channels_last: bool | None, device: torch.device) -> None:
        """Make one flat vector of a copy of the module, after a test that it works on the data."""
        model = copy.deepcopy(model).cpu()  # the user's module is not changed
        inputs = _inputs_for(model, self.data, channels_last, device, self.seed)
        example = inputs.gather(self.data.train, self.clients.indices[:2])[0]
        probe(model, example, len(self.data.classes), self.seed)
        self.model = FlatModel(model, device)
        self.inputs = replace(inputs, device=self.model.device)
        self.example = example.to(self.model.device)  # two inputs of the model
        self._theta = self.model.theta.clone()

    def _check_settings(self) -> None:
        """Refuse what makes no sense together."""
        require(
            self.method.federated or self.communication.uplink.exact,
            f"{type(self.method).__name__} sends nothing that communication.uplink could compress.",
        )
        setup = Setup(
            self.model,
            self.example,
            self.local,
            self.clients.sizes,
            self.weighting,
            self.communication.uplink.exact,
            self.ensembles.resets,
        )
        self.method.check(setup)
        self.method.objective.check(setup)
        self.server.check_names(self._theta)
        self.downlink = self.server.downlink(self._theta)

    def _build_engine(self) -> None:
        """Build what clients, evaluation and network need, and the engine; with workers, data goes to shared memory."""
        shared = None
        if self.workers:
            from fedadc.engines.workers import Workers, share_data

            shared = share_data(self.data, self.clients)
            self.data, self.clients = shared.dataset(self.data), shared.clients
        self.context = ClientContext(
            self.model,
            self.method,
            self.local,
            self.data.train,
            self.clients,
            len(self.data.classes),
            self.inputs,
            self.augment,
            self.seed,
            self.communication.uplink,
        )
        splits = {name: samples for name, samples in self.data.splits().items() if name != "train"}
        self.counter = MetricCounter(self.model, splits, self.inputs, self.context.classes, self.evaluation)
        self.network = self._network()
        scheme = self.network.downlink
        self.replica = ServerReplica.of(self.server, self.downlink, scheme, self._theta) if scheme.tracks else None
        self.engine: Engine = InProcess(self.context, self.counter)
        if shared is not None:
            server = self.server.start(self._theta)
            vectors = {name: server[name] for name in self.downlink}
            self.engine = Workers(self.context, self.counter, shared, self.workers, vectors)

    def _network(self) -> Network:
        clients, server, part = len(self.clients), self.server.start(self._theta), self.context.sent_part
        devices = None
        if self.clock is not None:  # names of a million clients are made only if a trace needs them
            names = self.client_names if self.clock.trace else range(clients)
            devices = self.clock.devices(names, generator(self.seed, "clock"))
        sent = {"theta": self._theta[part], **{name: server[name] for name in self.downlink}}
        full = sizes(sent) if self.method.federated else {}
        return Network(self.communication.downlink, devices, clients, self.seed, full, part, self.select)

    @property
    def training(self) -> Training:
        """The view of this federation that the outer loop has."""
        return Training(
            server=self.server,
            work=self.local,
            client_sizes=self.clients.sizes,
            downlink=self.downlink,
            select=self.select,
            weighting=self.weighting,
            faults=self.faults,
            network=self.network,
            replica=self.replica,
            run_clients=self.engine.run,
            seed=self.seed,
        )

    def close(self) -> None:
        """End the worker processes, if there are any; they are started again when they are needed."""
        self.engine.close()

    @property
    def evaluator(self) -> Evaluator:
        shares = self._local_shares if self.method.personalized else {}
        return Evaluator(self.method, self.ensembles, len(self.clients), self.counter, self.engine.count, shares)

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """The names of the clients in the data, or else their numbers."""
        owners = self.data.owners if self._natural else None
        return tuple(map(str, range(len(self.clients)) if owners is None else np.unique(owners)))

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
        theta = self._theta.clone()
        return RunState(
            0, theta, self.server.start(theta), ClientStates(Store(self.storage)), links=self.network.start()
        )

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
            trusted or self._fits(first),
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
        evaluated = self.evaluator.follow(train(self.training, rounds, first), rounds)
        return until(with_events(evaluated, self.engine.take_events), stop_at_accuracy)

    def _fits(self, state: RunState) -> bool:
        kept = self.context.client_state(self._theta).keys()
        some = next(iter(state.clients.values()), None)
        return (
            state.theta.shape == self._theta.shape
            and self.server.start(self._theta).keys() <= state.server.keys()
            and self.network.fits(state.links)
            and (not some or kept <= some.keys())
        )

    def load_state_dict(self, state: dict[str, torch.Tensor], source: str) -> None:
        """Start from given weights instead of the module's own."""
        self.model.load_state_dict(state, source)
        self._theta = self.model.theta.clone()
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
        return models_of(self.method, self.ensembles, state)


def _inputs_for(model: nn.Module, data: Dataset, channels_last: bool | None, device: torch.device, seed: int) -> Inputs:
    """How samples become the inputs of a model that is still on the CPU."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    planes = Inputs(data.normalization, dtype)
    images = len(data.input_shape) == 3
    require(images or not channels_last, "model.channels_last is for images [channels, height, width].")
    if not images or channels_last is False:
        return planes
    pixels = replace(planes, channels_last=True)
    if channels_last:
        return pixels
    some = np.arange(min(2, len(data.train)))
    x, pixel_by_pixel = (inputs.gather(data.train, some)[0] for inputs in (planes, pixels))
    return pixels if device.type == "cpu" and prefers_channels_last(model, x, pixel_by_pixel, seed) else planes


def _require_types(*arguments: tuple[Any, type, str]) -> None:
    """Check the types of arguments before any of them is used."""
    for value, kind, name in arguments:
        require(isinstance(value, kind), f"{name} must be {article(kind)}, not {value!r:.60}.")


def _cohort_size(cohort: int | float | None, clients: int) -> int:
    if cohort is None:
        return clients
    if isinstance(cohort, Integral) and not isinstance(cohort, bool):
        require(cohort >= 1, f"cohort.size must be at least 1, not {cohort}.")
        require(cohort <= clients, f"cohort.size is {cohort}, but there are only {clients} clients.")
        return int(cohort)
    require(isinstance(cohort, Real) and 0 < cohort <= 1, f"cohort.ratio must be in (0, 1], not {cohort!r}.")
    return max(1, round(float(cohort) * clients))
