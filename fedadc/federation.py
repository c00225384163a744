"""A federation: a model, clients with data, a method, and how they work together. It holds no state of a run."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from fedadc.cluster.settings import RayCluster, cluster_of
from fedadc.communication.clock import Clock
from fedadc.communication.network import Communication
from fedadc.data.batches import Augment
from fedadc.data.dataset import Array, Clients, Dataset
from fedadc.data.loaders.arrays import inputs_like
from fedadc.data.remarks import about_clients, about_sizes
from fedadc.data.roster import Roster, client_place
from fedadc.data.schema import DataSchema
from fedadc.data.shares import local_shares, shares_by_name
from fedadc.data.split import DEFAULT_TEST_SHARE, HeldOut
from fedadc.data.targets import with_scaled_targets
from fedadc.engines import InProcess
from fedadc.engines.base import Engine
from fedadc.engines.simulated import SimulatedClients
from fedadc.errors import DataError, FedadcError, article, one_line, require, unknown
from fedadc.evaluation.fairness import FAIRNESS, owner_of_rows
from fedadc.evaluation.metrics import Evaluation, MetricCounter
from fedadc.evaluation.report import Owners, SplitReport
from fedadc.methods import FedAvg, Method
from fedadc.objectives import DEFAULT_OBJECTIVES, OBJECTIVES, CrossEntropy, Objective
from fedadc.partitions import Natural, Partition, deal, default_partition
from fedadc.rng import generator
from fedadc.selections import Selection
from fedadc.server_half import ServerHalf
from fedadc.system.determinism import deterministic, resolve_device, resolve_workers
from fedadc.system.files import to_safetensors
from fedadc.training.agreement import agree
from fedadc.training.client_states import Storage
from fedadc.training.coordinator import Coordinator, Weighting
from fedadc.training.ensembles import Ensembles
from fedadc.training.faults import Faults, NormBound
from fedadc.training.server import Server
from fedadc.training.state import RunState
from fedadc.training.trace import Trace, TracedMembers
from fedadc.views.local_work import LocalWork

F = TypeVar("F", bound=Callable[..., Any])


def renamed_arguments(**new_names: str) -> Callable[[F], F]:
    """Accept arguments under their names of version 0.2, with a warning; gone in 0.4."""

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def wrapper(self: Any, **arguments: Any) -> Any:
            for old, new in new_names.items():
                if old in arguments:
                    require(new not in arguments, f"{old} and {new} are the same argument; give {new} alone.")
                    warnings.warn(f"Federation({old}=...) is now {new}=...", DeprecationWarning, stacklevel=2)
                    arguments[new] = arguments.pop(old)
            return function(self, **arguments)

        return cast("F", wrapper)

    return decorated


class Federation(ServerHalf):
    """Clients that train one model. `rounds(n)` yields a `Round` after each of n rounds."""

    @renamed_arguments(partition_by="partition", evaluation="evaluate")
    def __init__(
        self,
        *,
        model: nn.Module,
        data: Dataset,
        method: Method | None = None,  # None: FedAvg
        objective: Objective | None = None,  # what a client minimizes; None: the default of the task
        local: LocalWork | None = None,
        clients: int | None = None,  # how many clients the data is dealt to; None for natural clients
        partition: Partition | None = None,  # None: the data's own clients, else iid
        test: float | None = None,  # share to hold out; None: 0.2 if the data has no test samples; 0: none
        validation: float | None = None,  # share to hold out
        cohort: int | float | None = None,  # clients per round, as a number or as a share; None: all
        selection: Selection | None = None,  # None: uniform
        weighting: Weighting = "uniform",
        augment: Augment | None = None,
        evaluate: Evaluation | None = None,
        storage: Storage | None = None,
        faults: Faults | None = None,
        ensembles: Ensembles | None = None,
        communication: Communication | None = None,
        clock: Clock | None = None,
        seed: int = 0,
        data_seed: int | None = None,  # of the partition and the held-out shares; None: `seed`
        device: str | torch.device = "cpu",
        channels_last: bool | None = None,  # memory format of images; None: the faster one
        head: str | None = None,  # the layer of `model` whose output is the logits; None: its `head`, if it has `embed`
        workers: int | str = 0,  # processes that train clients, or "auto"; 0: this process
        engine: RayCluster | str | None = None,  # "ray" or a RayCluster trains the clients; None: this machine
    ) -> None:
        _require_types(
            model=model, data=data, local=local, clients=clients, partition=partition, selection=selection, clock=clock,
            augment=augment, evaluate=evaluate, storage=storage, faults=faults, ensembles=ensembles, seed=seed,
            communication=communication, data_seed=data_seed, head=head)  # fmt: skip
        self.seed, self._data_seed = seed, seed if data_seed is None else data_seed
        self.evaluation, self.storage = evaluate or Evaluation(), storage or Storage()
        trace = None if faults is None or faults.trace is None else Trace.read(Path(faults.trace))
        self._deal(_split(data, test, validation, self._data_seed), partition, clients, trace)
        server = Server(with_objective(method, objective, self.data.task.name), ensembles or Ensembles())
        links = communication or Communication()
        self.agreement = agree(
            model, self.data.spec, server, work=local or LocalWork(), augment=augment or Augment(), uplink=links.uplink,
            seed=seed, channels_last=channels_last, device=resolve_device(str(device)), samples=self.data.train,
            drift=self.evaluation.drift, bound=NormBound.of(faults or Faults()), head=head,
        )  # fmt: skip
        self.coordinator = Coordinator(
            self.agreement, self._roster(), cohort=cohort, selection=selection, weighting=weighting, faults=faults,
            downlink=links.downlink, clock=clock, members=None if trace is None else TracedMembers(trace),
        )  # fmt: skip
        self._build_engine(workers, cluster_of(engine, workers))

    def _deal(self, data: Dataset, partition: Partition | None, clients: int | None, trace: Trace | None) -> None:
        """Decide which samples each client has; with a trace, clients have the numbers that they have there."""
        self.data, self.clients = data, deal(data, partition, clients, self._data_seed)
        self._natural = isinstance(partition or default_partition(data), Natural)
        self._names = np.unique(data.owners) if self._natural and data.owners is not None else None
        if trace is None:
            return
        names = list(map(str, range(len(self.clients)) if self._names is None else self._names))
        strangers = [name for name in trace.names if name not in names]
        require(not strangers, f"faults.trace: the data has no client {', '.join(strangers)[:60]}.", DataError)
        self._names = np.array(trace.names)
        self.clients = self.clients.in_order([names.index(name) for name in trace.names])

    def _roster(self) -> Roster:
        """What the server of this federation knows about its clients."""
        counts = self._label_counts if self.data.task.has_classes else None
        return Roster(self.clients.sizes, self._names, counts)

    def _label_counts(self) -> Array:
        """The number of training samples per client and class, [clients, classes]; numbers are of one class."""
        return self.data.label_counts(self.clients)

    def _build_engine(self, workers: int | str, cluster: RayCluster | None) -> None:
        """Build the engine that runs the clients; with workers, data goes to shared memory."""
        self.cluster = cluster
        self.workers = 0 if cluster else resolve_workers(workers, str(self.model.device))
        shared = None
        if self.workers:
            from fedadc.engines.workers import Workers, share_data

            shared = share_data(self.data, self.clients)
            self.data, self.clients = shared.dataset(self.data), shared.clients
        splits = {name: samples for name, samples in self.data.splits().items() if name != "train"}
        agreement = self.agreement
        self.counter = MetricCounter(self.model, splits, agreement.inputs, agreement.task, self.evaluation)
        if FAIRNESS in self.evaluation.metrics:
            self.counter = replace(self.counter, owners=self._owners_of_held_out())
        self.simulated = SimulatedClients(agreement, self.data.train, self.clients)
        self.engine: Engine = InProcess(self.simulated, self.counter)
        if shared is not None:
            server = agreement.server.start(agreement.start)
            vectors = {name: server[name] for name in self.coordinator.downlink}
            self.engine = Workers(agreement, self.counter, shared, self.workers, vectors)
        elif cluster is not None:
            from fedadc.cluster.engine import RayEngine

            self.engine = RayEngine(agreement, self.counter, self.data, self.clients, cluster)
            self.slow_start = "" if cluster.address else "starting a Ray cluster on this machine"

    def _owners_of_held_out(self) -> dict[str, Array]:
        """The number of the client of every held-out row, where the rows name their clients; -1: it does not train."""
        splits = [name for name in self.counter.splits if self.names_owners(name)]
        require(
            self.method.federated or self.method.personalized,
            f"evaluate.metrics: fairness does not apply to {type(self.method).__name__}, which judges every client's "
            "model on the rows of all clients.",
        )
        require(
            bool(splits),
            "evaluate.metrics: fairness needs held-out rows that belong to clients, but "
            + (
                f"data {self.data.name} does not say whose they are."
                if self.counter.splits
                else "no rows are held out."
            ),
        )
        return {name: owner_of_rows(self._local_shares[name], len(self.counter.splits[name])) for name in splits}

    def names_owners(self, split: str) -> bool:
        """Whether the rows of a held-out split name their clients, which are those of this federation."""
        return self._natural and getattr(self.data, f"{split}_owners") is not None

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._natural:
            return self.data.notes
        weighs_alike = self.coordinator.weighting == "uniform"
        unequal = about_sizes(self.client_names, self.clients.sizes) if weighs_alike else []
        return (*self.data.notes, *about_clients(self.data), *unequal)

    @property
    def data_schema(self) -> DataSchema:
        return DataSchema.of(self.data)

    @property
    def samples_of_splits(self) -> dict[str, int]:
        return {name: len(samples) for name, samples in self.data.splits().items()}

    @property
    def engine_facts(self) -> dict[str, Any]:
        return {"workers": self.workers, "engine": "ray" if self.cluster else "local"}

    def data_checksum(self) -> str:
        """A checksum of all samples, the partition, and the parts of the model that are not trained."""
        digest = hashlib.sha256()
        for name, samples in self.data.splits().items():
            for tensor in (samples.x, samples.y):
                digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.cpu().contiguous().view(-1).numpy().data)
        for array in (self.clients.indices, self.clients.offsets):
            digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
        digest.update(to_safetensors(self.model.fixed()))
        return digest.hexdigest()

    @property
    def personal_shares(self) -> Mapping[str, Clients]:
        return self._local_shares if self.method.personalized else {}

    @property
    def local_tests(self) -> Clients:
        """Each client's share of the test samples: those that name it, or else in proportion to its labels."""
        require("test" in self._local_shares, f"data {self.data.name} has no test samples to share out.")
        return self._local_shares["test"]

    @property
    def held_out_shares(self) -> Mapping[str, Clients]:
        """Each client's share of every split except training."""
        return self._local_shares

    def owners_of(self, split: str) -> Owners:
        """Which client has which rows of a split: those that name it, or else a share in proportion to its labels."""
        if self.names_owners(split):
            return Owners.of(getattr(self.data, f"{split}_owners"), self.client_names)
        return Owners.of_shares(self._local_shares[split], self.client_names)

    def report(
        self, state: RunState, split: str = "test", *, metrics: Sequence[str] = (), positive: str | None = None
    ) -> SplitReport:
        """What the global model of a state does on a split: by client, by class, as a confusion matrix.

        `metrics` are figures such as auroc, beside accuracy, loss and those of `evaluate.metrics`.
        """
        self._require_fitting(state)
        require(bool(self.counter.splits), f"data {self.data.name} has held out no rows to report on.")
        if split not in self.counter.splits:
            raise unknown("split", split, self.counter.splits)
        theta, owners = self._predicting_model(state, None), functools.partial(self.owners_of, split)
        return SplitReport(
            split, self.counter, theta, self.data.classes, owners, positive, tuple(metrics), self._data_seed
        )

    @cached_property
    def _local_shares(self) -> dict[str, Clients]:
        """Each client's share of every split except training."""
        counts, shares = self._label_counts(), {}
        for name, samples in self.counter.splits.items():
            if self.names_owners(name):
                shares[name] = shares_by_name(getattr(self.data, f"{name}_owners"), self.client_names)
                continue
            rng = generator(self._data_seed, f"local {name} shares")
            shares[name] = local_shares(self.data.task.strata(samples.y), counts, rng)
        return shares

    def predict(self, state: RunState, x: Any, client: int | str | None = None) -> torch.Tensor:
        """The outputs for inputs like those of the data: logits [n, classes], or scaled numbers [n, targets].

        `.argmax(1)` of logits are positions in `data.classes`; `data.task.predicted` makes numbers of scaled ones.

        With `client`, a number or a name, they are those of the client's own model, where the method has such models.
        """
        self._require_fitting(state)
        theta, size = self._predicting_model(state, client), self.evaluation.batch_size
        samples = inputs_like(self.data.spec, x, self.data.name)
        with deterministic():
            batches = self.agreement.client_data(samples).in_order(None, size)
            logits = [self.model.predict(theta, batch.x).cpu() for batch in batches]
        return torch.cat(logits) if logits else torch.zeros((0, *self.data.task.outputs))

    def _predicting_model(self, state: RunState, client: int | str | None) -> torch.Tensor:
        name, names = type(self.method).__name__, self.client_names
        if client is None:
            require(
                self.method.federated and not self.method.headless,
                f"{name} has no global model that could predict; give client=, a client's number or name.",
            )
            return next(iter(self.vectors(state).values()))
        require(self.method.personalized, f"{name} has no clients' own models; leave out client.")
        own = state.clients.get(client_place(client, names))
        return self.method.personal(state.theta, self.method.client_state(state.theta) if own is None else own)

    def __repr__(self) -> str:
        roster, work = self.coordinator.roster, self.agreement.work
        amount = (
            f"{work.steps} steps" if work.epochs is None else f"{work.epochs} epochs".replace("1 epochs", "1 epoch")
        )
        return (
            f"Federation({type(self.model.module).__name__} with {self.model.theta.numel():,} parameters, "
            f"{self.data.name}, {len(roster):,} clients, {self.coordinator.cohort} per round, "
            f"{type(self.method).__name__} with {type(self.method.objective).__name__}, {amount} of "
            f"{work.batch_size} samples, lr {work.lr:g})"
        )


ARGUMENT_TYPES: dict[str, type] = {
    "model": nn.Module,
    "data": Dataset,
    "local": LocalWork,
    "clients": int,
    "partition": Partition,
    "selection": Selection,
    "augment": Augment,
    "evaluate": Evaluation,
    "storage": Storage,
    "faults": Faults,
    "ensembles": Ensembles,
    "communication": Communication,
    "clock": Clock,
    "seed": int,
    "data_seed": int,
    "head": str,
}


def _require_types(**arguments: Any) -> None:
    """Check the types of arguments before any of them is used; None is an argument that was not given."""
    for name, value in arguments.items():
        kind = ARGUMENT_TYPES[name]
        valid = value is None or (isinstance(value, kind) and not isinstance(value, bool))
        require(valid, f"{name} must be {article(kind)}, not {value!r:.60}.")


def with_objective(method: Method | None, objective: Objective | None, task: str = "classification") -> Method:
    """The method with its objective, which methods hold; until version 0.4 it may also be given there.

    Without one it is the default of the task.
    """
    method = FedAvg() if method is None else method
    own = getattr(method, "objective", None)
    require(isinstance(method, Method), f"method must be a Method, not {method!r:.60}.")
    require(isinstance(own, Objective), f"method.objective must be an Objective, not {own!r:.60}.")
    require(
        objective is None or isinstance(objective, Objective), f"objective must be an Objective, not {objective!r:.60}."
    )
    default = OBJECTIVES[DEFAULT_OBJECTIVES[task]]() if task in DEFAULT_OBJECTIVES else own
    if objective is None and own == CrossEntropy() != default:
        objective = default
    if objective is None:
        if own != CrossEntropy():
            text = "give the objective beside the method: Federation(method=..., objective=...)"
            warnings.warn(text, DeprecationWarning, stacklevel=4)  # the caller of Federation
        return method
    require(
        own in (CrossEntropy(), objective),
        f"objective is {objective!r:.60}, but the method has {own!r:.60}; give one of them.",
    )
    try:
        return replace(method, objective=objective)
    except TypeError as error:  # a user-defined class with its own __init__
        name = type(method).__name__
        raise FedadcError(f"method: {name} cannot be given an objective ({one_line(error)}).") from error


def _split(data: Dataset, test: float | None, validation: float | None, seed: int) -> Dataset:
    """The data with the shares held out that are asked for, as on the command line."""
    if test is None and data.test is None:
        test = DEFAULT_TEST_SHARE
    if test == 0:
        test = None
    held = data if test is None and validation is None else HeldOut(test, validation, seed)(data)
    return with_scaled_targets(held)
