"""Build a federation from a config: load the data, build the model, partition the data among the clients."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedadc.cluster.settings import RayCluster
from fedadc.communication.clock import Clock
from fedadc.config.ending import check_end
from fedadc.config.schema import hints_of, leaf
from fedadc.config.settings import AT_SITES, Config, DataConfig, Init, ModelConfig
from fedadc.data import DATASETS
from fedadc.data.dataset import Dataset, DataSpec, Normalization, Samples
from fedadc.data.roster import Roster
from fedadc.data.split import DEFAULT_TEST_SHARE, HeldOut
from fedadc.data.targets import with_scaled_targets
from fedadc.errors import DataError, DiskError, FedadcError, kind_of_failure, one_line, require, same_kind, unknown
from fedadc.evaluation.stopping import Stopping
from fedadc.federation import Federation, with_objective
from fedadc.models import MODELS
from fedadc.models.build import construct, read_weights, require_maker
from fedadc.partitions import Natural, default_partition
from fedadc.schedules import Constant
from fedadc.server_half import ServerHalf
from fedadc.training.agreement import Agreement, agree
from fedadc.training.coordinator import Coordinator
from fedadc.training.faults import Faults, NormBound
from fedadc.training.members import Members
from fedadc.training.server import Server
from fedadc.training.trace import Trace

# parameters of loaders and models that have a config key of their own or are filled in
NOT_OPTIONS = {"data_dir", "path", "test", "held_out", "fit_on", "task", "input_shape", "classes", "self"}
FILLED_IN = {"data_dir", "held_out", "fit_on", "task"}  # parameters of loaders that no config sets


@dataclass(frozen=True)
class TrainingPlan:
    """A validated config and what is to be trained, wherever its clients are."""

    config: Config  # complete: includes the defaults that depend on the data
    federation: ServerHalf


@dataclass(frozen=True)
class Plan(TrainingPlan):
    """A validated config and the simulated federation that was built from it."""

    federation: Federation


def prepare(
    config: Config,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    out: Path | None = None,
    workers: int = 0,
    cluster: RayCluster | None = None,
) -> Plan:
    """Load the data, build the model and partition the data; every impossible setting raises an error here.

    `out` is the run directory. Client states that do not fit in memory are stored there.
    """
    asked = _as_traced(complete(config))
    config, data = load_data(asked, data_dir)
    model, module = build_module(config, data.spec)
    with words_of_the_config(config):
        federation = Federation(
            model=module,
            data=data,
            test=0,  # held out already
            method=config.method,
            objective=config.objective,
            local=config.local,
            clients=config.data.clients,
            partition=config.data.partition,
            cohort=_cohort(config),
            selection=config.cohort.selection,
            weighting=config.cohort.weighting,
            augment=config.data.augment,
            evaluate=config.evaluate,
            storage=replace(config.storage, folder=_states_folder(config, out)),
            faults=_faults(config),
            ensembles=config.ensembles,
            communication=config.communication,
            clock=_clock(config),
            seed=config.seed,
            data_seed=config.data.seed,
            device=device,
            channels_last=model.channels_last,
            head=model.head,
            workers=workers,
            engine=None if cluster is None else replace(cluster, load=_loader(asked, data_dir)),
        )
    _load_weights(config, federation.agreement)
    check_end(config, federation)
    data_config = replace(config.data, clients=len(federation.clients))
    model = replace(model, channels_last=federation.agreement.inputs.channels_last)
    return Plan(replace(config, data=data_config, model=model), federation)


def _as_traced(config: Config) -> Config:
    """A run that repeats a trace ends where the federation has ended, if that may have stopped early.

    Whether it stops depends on the evaluation, and so on who was there.
    """
    trace = _faults(config).trace
    if trace is None or (config.stop.accuracy is None and config.stop.patience is None):
        return config
    last = len(Trace.read(Path(trace)).lines)
    return replace(config, rounds=min(config.rounds, last), stop=Stopping(metric=config.stop.metric))


@dataclass(frozen=True)
class DataOnDisk:
    """Loads the data of a config on another machine, if that has the same folder of data sets."""

    config: Config
    folder: Path

    def __call__(self) -> Dataset:
        require(self.folder.is_dir(), f"it has no folder {self.folder}", DataError)
        return load_data(self.config, self.folder)[1]


def _loader(config: Config, data_dir: str | Path | None) -> DataOnDisk | None:
    """How a node of a cluster may read the data itself; None: no folder is given, or the data needs a user's code."""
    if data_dir is None or config.data.name not in DATASETS:
        return None
    return DataOnDisk(config, Path(data_dir).expanduser().resolve())


def build_module(config: Config, spec: DataSpec) -> tuple[ModelConfig, torch.nn.Module]:
    """The module of a config for data of this kind, and its settings with all defaults filled in."""
    model = config.model
    maker = config.schema.lookup("model", model.name, MODELS)
    require_maker(maker, model.name)
    hints = hints_of(maker.__init__ if isinstance(maker, type) else maker)  # type: ignore[misc]
    options = {k: leaf(hints[k], v, f"model.{k}") if k in hints else v for k, v in model.options.items()}
    default_init: Init = getattr(maker, "preferred_init", "default")
    init = model.init or default_init
    seed = config.seed if model.seed is None else model.seed
    module = construct(maker, options, spec.input_shape, spec.task.outputs[0], seed, init)
    options = _with_defaults(inspect.signature(maker).parameters, model.options)
    return replace(model, init=init, options=options), module


def build_agreement(config: Config, spec: DataSpec, samples: Samples | None = None, device: str = "cpu") -> Agreement:
    """What server and clients agree on, from a `complete` config; a client checks the model with its own samples."""
    model, module = build_module(config, spec)
    with words_of_the_config(config):
        agreement = agree(
            module,
            spec,
            Server(with_objective(config.method, config.objective), config.ensembles),
            work=config.local,
            augment=config.data.augment,
            uplink=config.communication.uplink,
            seed=config.seed,
            channels_last=model.channels_last,
            device=device,
            samples=samples,
            drift=config.evaluate.drift,
            bound=NormBound.of(config.faults),
            head=model.head,
        )
    _load_weights(config, agreement)
    return agreement


def _load_weights(config: Config, agreement: Agreement) -> None:
    """Start from the weights that the config names, if it names some."""
    if config.model.weights is not None:
        path = config.file(config.model.weights)
        agreement.load_weights(read_weights(path), str(path))


def build_coordinator(
    config: Config, agreement: Agreement, roster: Roster, members: Members | None = None
) -> Coordinator:
    """The server's half, from a `complete` config; it needs no data."""
    with words_of_the_config(config):
        return Coordinator(
            agreement,
            roster,
            cohort=_cohort(config),
            selection=config.cohort.selection,
            weighting=config.cohort.weighting,
            faults=config.faults,
            downlink=config.communication.downlink,
            clock=_clock(config),
            members=members,
        )


def _cohort(config: Config) -> int | float | None:
    return config.cohort.size if config.cohort.ratio is None else float(config.cohort.ratio)


@contextmanager
def words_of_the_config(config: Config) -> Iterator[None]:
    """Let an error that begins with an argument of `Federation` or of a loader name the key of the config instead."""
    keys = {name: f"data.{name}" for name in (*DataConfig.__dataclass_fields__, *config.data.options)}
    keys |= {
        "cohort": "cohort.size" if config.cohort.ratio is None else "cohort.ratio",
        "selection": "cohort.selection",
        "weighting": "cohort.weighting",
        "channels_last": "model.channels_last",
        "head": "model.head",
    }
    try:
        yield
    except FedadcError as error:
        argument = re.match(r"\w+(?=: |\.| must | is | needs )", str(error))
        if argument and argument[0] in keys:
            raise same_kind(error, keys[argument[0]] + str(error)[argument.end() :]) from error
        raise


def _clock(config: Config) -> Clock | None:
    clock = config.clock
    if clock is None or clock.trace is None:
        return clock
    return replace(clock, trace=str(config.file(clock.trace)))


def _faults(config: Config) -> Faults:
    trace = config.faults.trace
    return config.faults if trace is None else replace(config.faults, trace=str(config.file(trace)))


def _states_folder(config: Config, out: Path | None) -> str | None:
    if config.storage.folder is None:
        return None if out is None else str(out)
    folder = config.file(config.storage.folder)
    require(folder.is_dir(), f"storage.folder: there is no folder {folder}.")
    try:
        tempfile.TemporaryDirectory(dir=folder).cleanup()
    except OSError as error:
        raise DiskError(f"storage.folder: {folder} is not writable ({error.strerror or error}).") from error
    return str(folder)


def complete(config: Config) -> Config:
    """Fill in the settings that default to other settings, so that the written config is complete."""
    data = config.data if config.data.seed is not None else replace(config.data, seed=config.seed)
    model = config.model if config.model.seed is not None else replace(config.model, seed=config.seed)
    local = config.local
    if local.schedule.horizon is None and not isinstance(local.schedule, Constant):
        local = replace(local, schedule=replace(local.schedule, horizon=config.rounds))
    return replace(config, data=data, model=model, local=local, method=config.method.complete())


def load_data(config: Config, data_dir: str | Path | None = None) -> tuple[Config, Dataset]:
    """Load the data, hold out test and validation shares, and return the config with these settings filled in."""
    node = config.data
    require(
        node.name != AT_SITES,
        "data.name is sites: this config is of a real federation, which `flwr run` starts; to simulate it, name data.",
    )
    file = node.test if isinstance(node.test, str) else None
    with words_of_the_config(config):
        share = None if isinstance(node.test, str) else DEFAULT_TEST_SHARE if node.test is None else node.test
        held_out = HeldOut(share, node.validation, config.seed if node.seed is None else node.seed)
        data, options, is_split = _run_loader(config, data_dir, held_out)
        if is_split or share is None:
            wanted = f" for {file}" if file else "; it must hold out the shares of held_out"
            require(data.test is not None, f"data.test: loader {node.name} returned no test data{wanted}.")
        elif data.test is not None:
            require(node.test is None, f"data {node.name} already has test data; remove data.test.")
            held_out = replace(held_out, test=None)
        data = with_scaled_targets(data if is_split else held_out(data))
    _check_task(config, data)
    column, rule = node.options.get("client"), node.partition
    require(
        column is None or rule is None or not rule.needs_clients or isinstance(rule, Natural),
        f"data.client says that column {column} names the clients, but data.partition would deal the rows anew; remove "
        f"data.partition, or replace data.client by data.drop: [{column}].",
    )
    node = replace(node, options=options, test=file or held_out.test)
    if node.normalize is not None:
        channels = data.input_shape[0]
        require(
            len(node.normalize.mean) in (1, channels),
            f"data.normalize has {len(node.normalize.mean)} values, but the inputs have {channels} channels.",
        )
        constants = Normalization(data.normalization.scale, node.normalize.mean, node.normalize.std)
        data = replace(data, normalization=constants)
    return replace(config, data=replace(node, partition=node.partition or default_partition(data))), data


def _check_task(config: Config, data: Dataset) -> None:
    """Refuse settings that need classes where the labels are numbers, and the other way round."""
    task, labels = data.task.name, "numbers" if data.targets else "classes"
    require(
        (config.task or "classification") == task,
        f"task is {config.task or 'classification'}, but the labels of data {config.data.name} are {labels}; set task "
        f"to {task}.",
    )
    require(
        config.stop.accuracy is None or data.task.has_classes,
        f"stop.accuracy needs classes, but the labels are {labels} (task: {task}).",
    )


def _run_loader(config: Config, data_dir: str | Path | None, held_out: HeldOut) -> tuple[Dataset, dict[str, Any], bool]:
    """Call the loader with the arguments that it accepts.

    Returns its data, its options with defaults filled in, and whether it has held out the shares itself.
    """
    node = config.data
    loader = config.schema.lookup("data", node.name, DATASETS)
    try:
        signature, hints = inspect.signature(loader), hints_of(loader)
    except (TypeError, ValueError):
        raise FedadcError(f"data.name: {node.name} is not a function that returns a Dataset.") from None
    parameters = {n: p for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    arguments: dict[str, Any] = {}
    for key, value in node.options.items():
        if key not in parameters or key in FILLED_IN:
            raise unknown("data: key", key, {*parameters, *DataConfig.__dataclass_fields__} - FILLED_IN - {"options"})
        arguments[key] = leaf(hints[key], value, f"data.{key}") if key in hints else value
    trace = _faults(config).trace  # sites that join later do not change how data is encoded
    first = None if trace is None else Trace.read(Path(trace)).first
    filled_in = {"data_dir": data_dir, "held_out": held_out, "fit_on": first, "task": config.task}
    arguments |= {name: value for name, value in filled_in.items() if name in parameters}
    for key, file in (("path", node.path), ("test", node.test if isinstance(node.test, str) else None)):
        require(file is None or key in parameters, f"data.{key} as a file does not apply to {node.name}.")
        if file is not None:
            arguments[key] = config.file(file)
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in arguments]
    if missing:
        raise FedadcError(f"data.{missing[0]} is missing: data {node.name} needs it.")
    try:
        data = loader(**arguments)
    except (FedadcError, MemoryError):
        raise
    except Exception as error:  # a bug in a user-defined loader
        raise kind_of_failure(error)(
            f"data.name: {node.name} failed ({type(error).__name__}: {one_line(error)})."
        ) from error
    require(isinstance(data, Dataset), f"data.name: {node.name} returned {type(data).__name__}, not a fedadc Dataset.")
    return data, _with_defaults(parameters, node.options), "held_out" in parameters


def with_new_options(config: Config) -> Config:
    """The config of a run of an earlier version, with the defaults of options that its data and model have got since.

    Defaults are chosen so that they do what was done before there was an option.
    """

    def filled(key: str, name: str, options: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
        if name == AT_SITES:
            return options
        return _with_defaults(inspect.signature(config.schema.lookup(key, name, known)).parameters, options)

    data, model = config.data, config.model
    data = replace(data, options=filled("data", data.name, data.options, DATASETS))
    return replace(config, data=data, model=replace(model, options=filled("model", model.name, model.options, MODELS)))


def _with_defaults(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options, and the defaults of all others whose values are plain enough for a config."""
    plain = (bool, int, float, str, list, tuple, type(None))
    defaults = {n: p.default for n, p in parameters.items() if isinstance(p.default, plain) and n not in NOT_OPTIONS}
    return {n: list(v) if isinstance(v, tuple) else v for n, v in {**defaults, **given}.items()}
