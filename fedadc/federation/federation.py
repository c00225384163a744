"""A federation: a model, clients with data, a method, and how they work together. It holds no state of a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedadc.data.batches import Augment, Inputs
from fedadc.data.dataset import Array, Clients, Dataset
from fedadc.data.partition import IID, Natural, Partition, deal, usual
from fedadc.data.shares import local_shares, shares_by_name
from fedadc.engines import Engine, InProcess
from fedadc.errors import FedadcError, require
from fedadc.evaluate import Evaluation, Evaluator, Examiner, models_of, until
from fedadc.exact import resolve_device, resolve_workers
from fedadc.federation.clock import Clock
from fedadc.federation.communication import Communication, Tracker, Wire
from fedadc.federation.downlink import Downlink
from fedadc.federation.ensembling import Ensembles
from fedadc.federation.faults import Faults
from fedadc.federation.ledger import sizes
from fedadc.federation.local import LocalWork, Workplace
from fedadc.federation.rounds import Round, RunState, train, with_events
from fedadc.federation.schedule import Schedule
from fedadc.federation.selection import Selection, Uniform, cohort_of
from fedadc.federation.server import Server
from fedadc.federation.store import ClientStates, Storage, Store
from fedadc.methods import FedAvg, Method
from fedadc.methods.base import State, state_of
from fedadc.models.build import prefers_channels_last, probe
from fedadc.models.flat import FlatModel
from fedadc.objectives import Objective
from fedadc.objectives.base import ENSEMBLES
from fedadc.rng import generator

Weighting = Literal["uniform", "samples"]


class Federation:
    """Clients that train one model. `rounds(n)` yields a `Round` after each of n rounds."""

    def __init__(
        self,
        *,
        model: nn.Module,
        data: Dataset,
        method: Method | None = None,
        local: LocalWork | None = None,
        clients: int | None = None,  # how many the data is dealt to; None for natural clients
        partition_by: Partition | None = None,  # None: the data's own clients, else iid
        cohort: int | float | None = None,  # how many clients a round, or which share of them; None: all
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
        channels_last: bool | None = None,  # how images lie in memory; None: as is quicker
        workers: int | str = 0,  # processes that train clients, or "auto"; 0: this one does
    ) -> None:
        self.method = FedAvg() if method is None else method
        self.local, augment = local or LocalWork(), augment or Augment()
        evaluation, self.storage = evaluation or Evaluation(), storage or Storage()
        self.faults, self.selection = faults or Faults(), selection or Uniform()
        communication, ensembles = communication or Communication(), ensembles or Ensembles()
        _check_kinds(
            (model, nn.Module, "model"),
            (data, Dataset, "data"),
            (self.method, Method, "method"),
            (getattr(self.method, "objective", None), Objective, "method.objective"),
            (self.local, LocalWork, "local"),
            (getattr(self.local, "schedule", None), Schedule, "local.schedule"),
            (augment, Augment, "augment"),
            (evaluation, Evaluation, "evaluation"),
            (partition_by or IID(), Partition, "partition_by"),
            (self.storage, Storage, "storage"),
            (self.faults, Faults, "faults"),
            (self.selection, Selection, "selection"),
            (ensembles, Ensembles, "ensembles"),
            (communication, Communication, "communication"),
            (clock or Clock(), Clock, "clock"),
            (seed, int, "seed"),
        )
        self.data, self.seed, self.weighting = data, seed, weighting
        self.server = Server(self.method, ensembles)
        require(weighting in ("uniform", "samples"), f"weighting is uniform or samples, not {weighting!r}.")
        require(
            not augment or len(data.input_shape) == 3,
            f"data.augment needs images [channels, height, width], not inputs of shape {list(data.input_shape)}.",
        )
        require(
            not augment or augment.crop <= min(data.input_shape[1:]),
            f"data.augment.crop is {augment.crop}, more than the images' {list(data.input_shape[1:])} pixels.",
        )
        self._data_seed = seed if data_seed is None else data_seed
        held = deal(data, partition_by, clients, self._data_seed)
        self._natural = isinstance(partition_by or usual(data, clients), Natural)
        self.cohort = _cohort_size(cohort, len(held))
        self._cohorts: dict[int, Array] = {}  # of rounds near the present one, by number
        self._choose = self.selection.chooser(
            len(held),
            self.cohort,
            lambda: held.class_counts(data.train.y, len(data.classes)),
            generator(seed, "selection"),
        )
        model = copy.deepcopy(model).cpu()  # the user's own stays as it is
        device, classes = torch.device(resolve_device(str(device))), len(data.classes)
        inputs = _inputs_for(model, data, channels_last, device, seed)
        example = inputs.gather(data.train, held.indices[:2])[0]
        probe(model, example, classes, seed)
        self.model = flat = FlatModel(model, device)
        inputs = replace(inputs, device=flat.device)
        require(
            self.method.federated or communication.uplink.exact,
            f"{type(self.method).__name__} sends nothing that communication.uplink could compress.",
        )
        self.workplace = Workplace(
            flat, self.method, self.local, data.train, held, classes, inputs, augment, seed, communication.uplink
        )
        self.example = example.to(flat.device)  # of what the model is given
        splits = {name: samples for name, samples in data.splits().items() if name != "train"}
        self.examiner = Examiner(flat, splits, inputs, classes, evaluation)
        self._theta = flat.theta.clone()
        self.method.check(self)
        self.method.objective.check(self)
        self._check_states()
        self.downlink = self._downlink()
        self.wire = self._wire(communication.downlink, clock)
        scheme = self.wire.downlink
        self.tracker = Tracker.of(self.server, self.downlink, scheme, self._theta) if scheme.tracks else None
        self.workers = resolve_workers(workers, str(device))
        self.engine = self._engine(self.workers)

    def _wire(self, downlink: Downlink, clock: Clock | None) -> Wire:
        clients, server = len(self.clients), self.server.start(self._theta)
        devices = None
        if clock is not None:  # a million names are made only where a trace asks for them
            names = self.client_names if clock.trace else range(clients)
            devices = clock.devices(names, generator(self.seed, "clock"))
        theta = {"theta": self._theta[self.workplace.travelling]}
        full = sizes({**theta, **{name: server[name] for name in self.downlink}}) if self.method.federated else {}
        return Wire(downlink, devices, clients, self.seed, full, self.select)

    def size_of(self, mean: State | None) -> int:
        """Bytes of the mean of a round's uploads, where it is sent to clients."""
        if not mean:
            return 0
        part = {"delta": mean["delta"][self.workplace.travelling]} if "delta" in mean else {}
        return sum(sizes({**mean, **part}).values())

    def select(self, round: int) -> Array:
        """The cohort of a round, known at any time: it depends on nothing that training does."""
        if round not in self._cohorts:
            chosen = self._choose(generator(self.seed, "cohort", round))
            cohort = cohort_of(chosen, len(self.clients), self.cohort, type(self.selection).__name__)
            self._cohorts = {t: c for t, c in self._cohorts.items() if abs(t - round) <= 2} | {round: cohort}
        return self._cohorts[round].copy()

    def _engine(self, workers: int) -> Engine:
        if workers == 0:
            return InProcess(self.workplace, self.examiner)
        from fedadc.engines.workers import Workers

        server = self.start().server
        engine = Workers(self.workplace, self.examiner, workers, {name: server[name] for name in self.downlink})
        self.workplace, self.examiner = engine.place, engine.examiner  # the same data, in shared memory
        splits: dict[str, Any] = self.examiner.splits
        self.data = replace(self.data, train=self.workplace.train, **splits)
        return engine

    def close(self) -> None:
        """End worker processes, if there are any; they come back when they are needed."""
        self.engine.close()

    @property
    def evaluator(self) -> Evaluator:
        shares = self._local_shares if self.method.personalised else {}
        ensembles = self.server.ensembles
        return Evaluator(self.method, ensembles, len(self.clients), self.examiner, self.engine.measure, shares)

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """As the data names them, else their numbers."""
        owners = self.data.owners if self._natural else None
        return tuple(map(str, range(len(self.clients)) if owners is None else np.unique(owners)))

    @property
    def local_tests(self) -> Clients:
        """Each client's own share of the test samples: those that name it, else in the proportions of its labels."""
        require("test" in self._local_shares, f"data {self.data.name} has no test samples to share out.")
        return self._local_shares["test"]

    @cached_property
    def _local_shares(self) -> dict[str, Clients]:
        """The same of each split that is not for training."""
        counts = self.clients.class_counts(self.data.train.y, len(self.data.classes))
        shares = {}
        for name, samples in self.examiner.splits.items():
            owners = getattr(self.data, f"{name}_owners")
            if self._natural and owners is not None:
                shares[name] = shares_by_name(owners, self.client_names)
                continue
            rng = generator(self._data_seed, f"local {name} shares")
            shares[name] = local_shares(samples.y.numpy(), counts, rng)
        return shares

    def _check_states(self) -> None:
        """Method and objective keep their states side by side: no name may stand for two."""
        owners = (self.method, self.method.objective)
        for which in ("server_state", "client_state"):
            states = [state_of(getattr(o, which)(self._theta), f"{type(o).__name__}.{which}") for o in owners]
            for name in states[0].keys() & states[1].keys():
                names = " and ".join(type(o).__name__ for o in owners)
                raise FedadcError(f"{names} both have {name!r} in their {which}; rename one of them.")
        averages, own = self.server.ensembles.averages, self.method.server_state(self._theta)
        for name in averages.keys() & {*own, *self.method.objective.server_state(self._theta)}:
            raise FedadcError(f"the server's state has {name!r}, which is the name of an ensemble; rename it.")
        require(
            (self.method.federated and not self.method.headless) or not averages,
            f"{type(self.method).__name__} has no global models over which {', '.join(averages)} could average.",
        )

    def _downlink(self) -> tuple[str, ...]:
        """The server vectors that travel with theta: the method's and the objective's."""
        kept = self.server.start(self._theta)
        names: dict[str, None] = {}
        for owner in (self.method, self.method.objective):
            for which in ("downlink", "tracked"):
                value, kind = getattr(owner, which, ()), type(owner).__name__
                require(isinstance(value, tuple), f"{kind}.{which} must be a tuple of names, not {value!r}.")
            for name in owner.downlink:
                require(
                    name in kept or name not in ENSEMBLES,
                    f"{type(owner).__name__} asks the ensemble {name}, which this run does not have; switch it on with "
                    f"ensembles: {{{name}: {{}}}}.",
                )
                require(
                    name in kept,
                    f"{type(owner).__name__} needs the server's {name!r}, which no server_state of "
                    f"{type(self.method).__name__} or {type(self.method.objective).__name__} returns.",
                )
                names[name] = None
        return tuple(names)

    def start(self) -> RunState:
        """The run before its first round."""
        theta = self._theta.clone()
        return RunState(0, theta, self.server.start(theta), ClientStates(Store(self.storage)), links=self.wire.start())

    def rounds(
        self,
        rounds: int,
        start: RunState | None = None,
        stop_at_accuracy: float | None = None,
        trusted: bool = False,
    ) -> Iterator[Round]:
        """Train up to round `rounds`, from the beginning or from a state of an earlier round.

        A state that is not trusted is looked at, whether it could be of this federation.
        """
        begun = self.start() if start is None else start
        require(
            isinstance(begun, RunState), f"start must be a RunState (a Round's .state), not a {type(begun).__name__}."
        )
        require(trusted or self._could_be_mine(begun), "start is the state of another model or method.")
        require(
            isinstance(rounds, int) and rounds >= max(1, begun.round),
            f"rounds must be a whole number, at least {max(1, begun.round)}, not {rounds!r}.",
        )
        folder = self.storage.folder
        require(folder is None or Path(folder).is_dir(), f"storage.folder: there is no folder {folder}.")
        require(
            stop_at_accuracy is None or 0 < stop_at_accuracy <= 1,
            f"stop_at_accuracy must lie in (0, 1], not {stop_at_accuracy}.",
        )
        begun = replace(begun, clients=begun.clients.kept_in(self.storage))
        evaluated = self.evaluator.follow(train(self, rounds, begun), rounds)
        return until(with_events(evaluated, self.engine.take_events), stop_at_accuracy)

    def _could_be_mine(self, state: RunState) -> bool:
        kept = self.workplace.client_state(self._theta).keys()
        some = next(iter(state.clients.values()), None)
        return (
            state.theta.shape == self._theta.shape
            and self.server.start(self._theta).keys() <= state.server.keys()
            and self.wire.could_be(state.links)
            and (not some or kept <= some.keys())
        )

    @property
    def clients(self) -> Clients:
        return self.workplace.clients

    def load_state_dict(self, state: dict[str, torch.Tensor], source: str) -> None:
        """Start from given weights instead of the module's own."""
        self.model.load_state_dict(state, source)
        self._theta = self.model.theta.clone()
        self.engine.close()  # workers have the module as it was

    def state_dict(self, state: RunState) -> dict[str, torch.Tensor]:
        """The model of a state by which its run is judged, for `load_state_dict` of your own module."""
        require(self.method.federated, f"{type(self.method).__name__} has no global model; see state.clients.")
        return next(iter(self.models(state).values()))

    def models(self, state: RunState) -> dict[str, dict[str, torch.Tensor]]:
        """The state dicts of all models of a state by name, first the one by which its run is judged."""
        return {name: self.model.state_dict(vector) for name, vector in self.vectors(state).items()}

    def vectors(self, state: RunState) -> dict[str, torch.Tensor]:
        """The same as flat vectors."""
        return models_of(self.method, self.server.ensembles, state)


def _inputs_for(model: nn.Module, data: Dataset, channels_last: bool | None, device: torch.device, seed: int) -> Inputs:
    """How the data is given to a model that is still on the CPU."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    planes = Inputs(data.normalisation, dtype)
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


def _check_kinds(*arguments: tuple[Any, type, str]) -> None:
    """Each argument of the right kind, before any of them is used."""
    for value, kind, name in arguments:
        require(isinstance(value, kind), f"{name} must be a {kind.__name__}, not {value!r:.60}.")


def _cohort_size(cohort: int | float | None, clients: int) -> int:
    if cohort is None:
        return clients
    if isinstance(cohort, Integral) and not isinstance(cohort, bool):
        require(cohort >= 1, f"cohort.size must be at least 1, not {cohort}.")
        require(cohort <= clients, f"cohort.size is {cohort}, but there are only {clients} clients.")
        return int(cohort)
    require(isinstance(cohort, Real) and 0 < cohort <= 1, f"cohort.ratio must lie in (0, 1], not {cohort!r}.")
    return max(1, round(float(cohort) * clients))
