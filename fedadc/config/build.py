"""Build a federation from a config: load the data, build the model, partition the data among the clients."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedadc.communication.clock import Clock
from fedadc.config.schema import hints_of, leaf
from fedadc.config.settings import Config, DataConfig, Init
from fedadc.data import DATASETS
from fedadc.data.dataset import Dataset, Normalization
from fedadc.data.split import hold_out
from fedadc.errors import DiskError, FedadcError, kind_of_failure, one_line, require, unknown
from fedadc.federation import Federation
from fedadc.methods import Method
from fedadc.models import MODELS
from fedadc.models.build import construct, read_weights
from fedadc.partitions import default_partition
from fedadc.schedules import Constant

# parameters of loaders and models that have a config key of their own or are filled in
NOT_OPTIONS = {"data_dir", "path", "test", "input_shape", "classes", "self"}
DEFAULT_TEST_SHARE = 0.2


@dataclass(frozen=True)
class Plan:
    """A validated config and the federation that was built from it."""

    config: Config  # complete: includes the defaults that depend on the data
    federation: Federation


def prepare(
    config: Config,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    out: Path | None = None,
    workers: int = 0,
) -> Plan:
    """Load the data, build the model and partition the data; every impossible setting raises an error here.

    `out` is the run directory. Client states that do not fit in memory are stored there.
    """
    config, data = load_data(_complete(config), data_dir)
    model = config.model
    cls = config.schema.lookup("model", model.name, MODELS, torch.nn.Module)
    hints = hints_of(cls.__init__)
    options = {k: leaf(hints[k], v, f"model.{k}") if k in hints else v for k, v in model.options.items()}
    default_init: Init = getattr(cls, "preferred_init", "default")
    init = model.init or default_init
    seed = config.seed if model.seed is None else model.seed
    module = construct(cls, options, data.input_shape, len(data.classes), seed, init)
    federation = Federation(
        model=module,
        data=data,
        method=_with_objective(config),
        local=config.local,
        clients=config.data.clients,
        partition_by=config.data.partition,
        cohort=config.cohort.size if config.cohort.ratio is None else float(config.cohort.ratio),
        selection=config.cohort.selection,
        weighting=config.cohort.weighting,
        augment=config.data.augment,
        evaluation=config.evaluate,
        storage=replace(config.storage, folder=_states_folder(config, out)),
        faults=config.faults,
        ensembles=config.ensembles,
        communication=config.communication,
        clock=_clock(config),
        seed=config.seed,
        data_seed=config.data.seed,
        device=device,
        channels_last=model.channels_last,
        workers=workers,
    )
    if model.weights is not None:
        path = config.file(model.weights)
        federation.load_state_dict(read_weights(path), str(path))
    data_config = replace(config.data, clients=len(federation.clients))
    options = _with_defaults(inspect.signature(cls).parameters, model.options)
    model = replace(model, init=init, channels_last=federation.context.inputs.channels_last, options=options)
    return Plan(replace(config, data=data_config, model=model), federation)


def _with_objective(config: Config) -> Method:
    try:
        return replace(config.method, objective=config.objective)
    except TypeError as error:  # a user-defined class with its own __init__
        name = type(config.method).__name__
        raise FedadcError(f"method: {name} cannot be given an objective ({one_line(error)}).") from error


def _clock(config: Config) -> Clock | None:
    clock = config.clock
    if clock is None or clock.trace is None:
        return clock
    return replace(clock, trace=str(config.file(clock.trace)))


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


def _complete(config: Config) -> Config:
    """Fill in the settings that default to other settings, so that the written config is complete."""
    data = config.data if config.data.seed is not None else replace(config.data, seed=config.seed)
    model = config.model if config.model.seed is not None else replace(config.model, seed=config.seed)
    local = config.local
    if local.schedule.horizon is None and not isinstance(local.schedule, Constant):
        local = replace(local, schedule=replace(local.schedule, horizon=config.rounds))
    return replace(config, data=data, model=model, local=local, method=config.method.complete())


def load_data(config: Config, data_dir: str | Path | None = None) -> tuple[Config, Dataset]:
    """Load the data, hold out test and validation shares, and return the config with these settings filled in."""
    data, options = _run_loader(config, data_dir)
    node = replace(config.data, options=options)
    seed = config.seed if node.seed is None else node.seed
    if isinstance(node.test, str):
        require(data.test is not None, f"data.test: loader {node.name} returned no test data for {node.test}.")
    elif data.test is None:
        node = replace(node, test=DEFAULT_TEST_SHARE if node.test is None else node.test)
        data = hold_out(data, float(node.test or 0), "test", seed)
    else:
        require(node.test is None, f"data {node.name} already has test data; remove data.test.")
    if node.validation is not None:
        data = hold_out(data, float(node.validation), "validation", seed)
    if node.normalize is not None:
        channels = data.input_shape[0]
        require(
            len(node.normalize.mean) in (1, channels),
            f"data.normalize has {len(node.normalize.mean)} values, but the inputs have {channels} channels.",
        )
        constants = Normalization(data.normalization.scale, node.normalize.mean, node.normalize.std)
        data = replace(data, normalization=constants)
    return replace(config, data=replace(node, partition=node.partition or default_partition(data, node.clients))), data


def _run_loader(config: Config, data_dir: str | Path | None) -> tuple[Dataset, dict[str, Any]]:
    """Call the loader with the arguments that it accepts; return its data and its options with defaults filled in."""
    node = config.data
    loader = config.schema.lookup("data", node.name, DATASETS)
    try:
        signature, hints = inspect.signature(loader), hints_of(loader)
    except (TypeError, ValueError):
        raise FedadcError(f"data.name: {node.name} is not a function that returns a Dataset.") from None
    parameters = {n: p for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    arguments: dict[str, Any] = {}
    for key, value in node.options.items():
        if key not in parameters or key == "data_dir":
            raise unknown("data: key", key, {*parameters, *DataConfig.__dataclass_fields__} - {"data_dir", "options"})
        arguments[key] = leaf(hints[key], value, f"data.{key}") if key in hints else value
    if "data_dir" in parameters:
        arguments["data_dir"] = data_dir
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
    return data, _with_defaults(parameters, node.options)


def _with_defaults(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options, and the defaults of all others whose values are plain enough for a config."""
    plain = (bool, int, float, str, list, tuple, type(None))
    defaults = {n: p.default for n, p in parameters.items() if isinstance(p.default, plain) and n not in NOT_OPTIONS}
    return {n: list(v) if isinstance(v, tuple) else v for n, v in {**defaults, **given}.items()}
