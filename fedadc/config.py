"""One validated tree for a run, and how it becomes a federation. `fedadc init` writes a commented example."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from fedadc.data import DATASETS
from fedadc.data.batches import Augment
from fedadc.data.dataset import Dataset, Normalisation
from fedadc.data.partition import IID, PARTITIONS, Natural, Partition
from fedadc.data.split import hold_out
from fedadc.errors import FedadcError, require, unknown
from fedadc.evaluate import Evaluation
from fedadc.federation.federation import Federation, Weighting
from fedadc.federation.local import MOST, LocalWork
from fedadc.federation.schedule import SCHEDULES, Constant, Schedule
from fedadc.methods import METHODS, PAIRS, FedAvg, Method
from fedadc.models import MODELS
from fedadc.models.build import construct, read_weights
from fedadc.objectives import OBJECTIVES, CrossEntropy, Objective
from fedadc.schema import Schema, Tables, hints_of, leaf, one_line

NOT_OPTIONS = {"data_dir", "path", "test", "input_shape", "classes", "self"}
TABLES: Tables = {Method: METHODS, Objective: OBJECTIVES, Partition: PARTITIONS, Schedule: SCHEDULES}
DEFAULT_TEST_SHARE = 0.2
Init = Literal["default", "kaiming"]
LARGEST_FILE = 1 << 20  # bytes of a config
LARGEST_TREE = 100_000  # values in it


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Constants per channel, for inputs that are scaled to [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        require(len(self.mean) == len(self.std) > 0, "data.normalize needs as many mean as std values.")
        require(all(0 < s < math.inf for s in self.std), "data.normalize.std must be above 0 and finite.")
        require(all(map(math.isfinite, self.mean)), "data.normalize.mean must be finite.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data, held by whom."""

    name: str  # a name of `fedadc list datasets`, or module:function returning a Dataset
    path: str | None = None  # npz, folder, csv: your file or folder
    test: float | str | None = None  # a file or folder, or a stratified share where the data has no test part
    validation: float | None = None  # a stratified share of the training data, for choosing settings
    clients: int | None = None  # how many; natural and pooled partitions know it themselves
    partition: Partition | None = None  # None: natural where the data names clients, else iid
    seed: int | None = None  # of partition and shares; None: the run's
    normalize: Normalize | None = None  # None: the loader's constants
    augment: Augment = field(default_factory=Augment)
    options: dict[str, Any] = field(default_factory=dict, metadata={"rest": True})  # the loader's own


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and where it starts."""

    name: str  # a name of `fedadc list models`, or module:Class
    seed: int | None = None  # of the weights; None: the run's
    init: Init | None = None  # None: what the model prefers
    weights: str | None = None  # a safetensors file to start from
    options: dict[str, Any] = field(default_factory=dict, metadata={"rest": True})  # the model's own


@dataclass(frozen=True, kw_only=True)
class CohortConfig:
    """Who takes part in a round, and what weight an upload has."""

    size: int | None = None
    ratio: float | None = None  # C; without either, all clients take part
    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        require(
            self.size is None or self.ratio is None,
            "give cohort.size or cohort.ratio, not both (null switches one off).",
        )


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """When to end before the last round."""

    accuracy: float | None = None  # validation accuracy where there is validation data, else test accuracy

    def __post_init__(self) -> None:
        require(
            self.accuracy is None or 0 < self.accuracy <= 1, f"stop.accuracy must lie in (0, 1], not {self.accuracy}."
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    seed: int = 0
    rounds: int
    label: str | None = None  # how tables and plots call this run
    data: DataConfig
    model: ModelConfig
    method: Method = field(default_factory=FedAvg)
    objective: Objective = field(default_factory=CrossEntropy)
    local: LocalWork = field(default_factory=LocalWork)
    cohort: CohortConfig = field(default_factory=CohortConfig)
    evaluate: Evaluation = field(default_factory=Evaluation)
    stop: StopConfig = field(default_factory=StopConfig)
    folder: Path = field(default=Path(), metadata={"config": False}, compare=False)  # where files are looked up first

    def __post_init__(self) -> None:
        require(self.rounds >= 1, f"rounds must be at least 1, not {self.rounds}.")
        require(self.rounds <= MOST, f"rounds must be at most {MOST}, not {self.rounds}.")
        require(0 <= self.seed < 2**63, f"seed must lie in 0..2^63-1, not {self.seed}.")

    @property
    def schema(self) -> Schema:
        return Schema(TABLES, self.folder)

    def tree(self) -> dict[str, Any]:
        """Plain values that `load_config` turns into this config again."""
        tree: dict[str, Any] = self.schema.dump(self)
        return tree

    def yaml(self) -> str:
        return yaml.safe_dump(self.tree(), sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)

    def file(self, name: str) -> Path:
        """A file that the config names: beside the config, else where the command runs."""
        try:
            path = Path(name).expanduser()
            return path if path.is_absolute() or not (self.folder / path).exists() else self.folder / path
        except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown ~user, a NUL
            raise FedadcError(f"{_short(name)} is no usable path ({one_line(error)}).") from error


def load_config(
    source: Config | Mapping[str, Any] | str | Path, overrides: Sequence[str] = (), folder: Path | None = None
) -> Config:
    """A config from a file, a mapping or a config, with `key.sub=value` overrides, checked and complete."""
    if isinstance(source, Config):
        tree, folder = source.tree(), source.folder
    elif isinstance(source, Mapping):
        tree, folder = dict(source), folder or Path.cwd()
    else:
        tree, folder = read_yaml(Path(source)), folder or Path(source).resolve().parent
    for override in overrides:
        tree = _override(tree, override)
    try:
        config = Schema(TABLES, folder).build(Config, _expand_pairs(tree))
    except RecursionError:
        raise FedadcError("the config is nested too deeply.") from None
    return _complete(replace(config, folder=folder))


def _expand_pairs(tree: Mapping[str, Any], overriding: bool = False) -> dict[str, Any]:
    """`method: fedadc+` is short for a method and an objective. As an override it replaces an objective; in one file
    with another objective it contradicts itself."""
    tree = dict(tree)
    method = tree.get("method")
    short = method.get("name") if isinstance(method, Mapping) else method
    if not isinstance(short, str) or short not in PAIRS:
        return tree
    name, wanted = PAIRS[short]
    objective = tree.get("objective") or {}
    objective = dict(objective) if isinstance(objective, Mapping) else {"name": objective}
    if objective.get("name", wanted) != wanted:
        require(
            overriding,
            f"method {short} is {name} with objective {wanted}; for {objective['name']!r} write method: {name}.",
        )
        objective = {}
    tree["method"] = {**(method if isinstance(method, Mapping) else {}), "name": name}
    tree["objective"] = {**objective, "name": wanted}
    return tree


def _complete(config: Config) -> Config:
    """Fill in what follows from other keys, so that the written config says all there is to know."""
    data = config.data if config.data.seed is not None else replace(config.data, seed=config.seed)
    model = config.model if config.model.seed is not None else replace(config.model, seed=config.seed)
    local = config.local
    if local.schedule.horizon is None and not isinstance(local.schedule, Constant):
        local = replace(local, schedule=replace(local.schedule, horizon=config.rounds))
    return replace(config, data=data, model=model, local=local)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


# --- reading ---------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number and a key cannot stand twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.value in seen if isinstance(key_node.value, str) else False:
                problem = f"key {key_node.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(str(key_node.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, source: str) -> Any:
    try:
        tree = yaml.load(text, _Loader)
    except RecursionError:
        raise FedadcError(f"{source} is nested too deeply.") from None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise FedadcError(f"{source}{at} is not valid YAML: {problem}.") from error
    _check_size(tree, source)
    return tree


def _check_size(tree: Any, source: str) -> None:
    """Aliases make a small file a huge tree, or one that holds itself: count before anybody walks it."""
    nodes, todo = 0, [tree]
    while todo:
        node = todo.pop()
        nodes += 1
        require(nodes <= LARGEST_TREE, f"{source} expands to more than {LARGEST_TREE} values; a config is smaller.")
        if isinstance(node, dict):
            todo += [*node.keys(), *node.values()]
        elif isinstance(node, list | tuple | set):
            todo += node


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        require(not path.is_dir(), f"{path} is a folder; a config is a YAML file.")
        require(path.is_file(), f"there is no config {path}; `fedadc init` writes one to start from.")
        require(path.stat().st_size <= LARGEST_FILE, f"{path} is larger than a config can be ({LARGEST_FILE} bytes).")
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise FedadcError(f"{_short(str(path))} cannot be read as text ({one_line(error)}).") from error
    require(isinstance(tree, dict), f"{path} must be a mapping of keys, as in `rounds: 60`.")
    return dict(tree)


def _override(tree: Mapping[str, Any], override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    require(bool(equals) and all(parts), f"{override!r} is not an override; write key.sub=value, e.g. local.lr=0.05.")
    value = parse_yaml(text, f"the value of {key}")
    changed = _with(tree, parts, value, key)
    return _expand_pairs(changed, overriding=True) if parts[0] == "method" else changed


def _with(tree: Any, parts: Sequence[str], value: Any, key: str) -> dict[str, Any]:
    if isinstance(tree, str) and parts:
        tree = {"name": tree}  # method: fedadc, then method.beta=0.8
    require(tree is None or isinstance(tree, Mapping), f"{key}: {parts[0]} stands below a plain value.")
    changed: dict[str, Any] = dict(tree or {})
    changed[parts[0]] = value if len(parts) == 1 else _with(changed.get(parts[0]), parts[1:], value, key)
    return changed


# --- building --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A config that is known to work, and its federation."""

    config: Config  # complete: also with what only the data could tell
    federation: Federation


def prepare(config: Config, data_dir: str | Path | None = None, device: str = "cpu") -> Plan:
    """Load the data, build the model, deal out the clients; every impossible setting is an error here."""
    config, data = load_data(config, data_dir)
    chosen = config.model
    cls = config.schema.lookup("model", chosen.name, MODELS, torch.nn.Module)
    hints = hints_of(cls.__init__)
    options = {k: leaf(hints[k], v, f"model.{k}") if k in hints else v for k, v in chosen.options.items()}
    preferred: Init = getattr(cls, "preferred_init", "default")
    init = chosen.init or preferred
    seed = config.seed if chosen.seed is None else chosen.seed
    module = construct(cls, options, data.input_shape, len(data.classes), seed, init)
    federation = Federation(
        model=module,
        data=data,
        method=replace(config.method, objective=config.objective),
        local=config.local,
        clients=config.data.clients,
        partition_by=config.data.partition,
        cohort=config.cohort.size if config.cohort.ratio is None else float(config.cohort.ratio),
        weighting=config.cohort.weighting,
        augment=config.data.augment,
        evaluation=config.evaluate,
        seed=config.seed,
        data_seed=config.data.seed,
        device=device,
    )
    if chosen.weights is not None:
        path = config.file(chosen.weights)
        federation.load_state_dict(read_weights(path), str(path))
    known = replace(config.data, clients=len(federation.clients))
    shown = replace(chosen, init=init, options=_defaults(inspect.signature(cls).parameters, chosen.options))
    return Plan(replace(config, data=known, model=shown), federation)


def load_data(config: Config, data_dir: str | Path | None = None) -> tuple[Config, Dataset]:
    """The data of a config with its test and validation parts, and the config that says where they come from."""
    node = config.data
    loader = config.schema.lookup("data", node.name, DATASETS)
    require(callable(loader), f"data.name: {node.name} is not a function that returns a Dataset.")
    try:
        signature, hints = inspect.signature(loader), hints_of(loader)
    except (TypeError, ValueError):
        raise FedadcError(f"data.name: {node.name} is not a function that returns a Dataset.") from None
    parameters = {n: p for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    arguments: dict[str, Any] = {}
    for key, value in node.options.items():
        if key not in parameters or key == "data_dir":
            known = {*parameters, *DataConfig.__dataclass_fields__} - {"data_dir", "options"}
            raise unknown("data: key", key, known)
        arguments[key] = leaf(hints[key], value, f"data.{key}") if key in hints else value
    if "data_dir" in parameters:
        arguments["data_dir"] = data_dir
    require(node.path is None or "path" in parameters, f"data.path does not apply to {node.name}.")
    if node.path is not None:
        arguments["path"] = config.file(node.path)
    if isinstance(node.test, str):
        require("test" in parameters, f"data.test as a file does not apply to {node.name}.")
        arguments["test"] = config.file(node.test)
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in arguments and n != "self"]
    require(not missing, f"data.{missing[0] if missing else ''} is missing: data {node.name} needs it.")
    try:
        data = loader(**arguments)
    except (FedadcError, MemoryError):
        raise
    except Exception as error:  # a stranger's loader
        raise FedadcError(f"data.name: {node.name} failed ({type(error).__name__}: {one_line(error)}).") from error
    require(isinstance(data, Dataset), f"data.name: {node.name} returned {type(data).__name__}, not a fedadc Dataset.")

    seed = config.seed if node.seed is None else node.seed
    if isinstance(node.test, str):
        require(data.test is not None, f"data.test: {node.name} made no test part of {node.test}.")
    elif data.test is None:
        share = DEFAULT_TEST_SHARE if node.test is None else float(node.test)
        data, node = hold_out(data, share, "test", seed), replace(node, test=share)
    else:
        require(node.test is None, f"data {node.name} has a test part of its own; leave out data.test.")
    if node.validation is not None:
        data = hold_out(data, float(node.validation), "validation", seed)
    if node.normalize is not None:
        channels = data.input_shape[0]
        require(
            len(node.normalize.mean) in (1, channels),
            f"data.normalize has {len(node.normalize.mean)} values, but the inputs have {channels} channels.",
        )
        constants = Normalisation(data.normalisation.scale, node.normalize.mean, node.normalize.std)
        data = replace(data, normalisation=constants)
    rule = node.partition or (Natural() if data.owners is not None and node.clients is None else IID())
    node = replace(node, options=_defaults(parameters, node.options))
    return replace(config, data=replace(node, partition=rule)), data


def _defaults(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings given and the defaults of the others, as far as they are plain values that a config can show."""
    plain = (bool, int, float, str, list, tuple, type(None))
    shown = {n: p.default for n, p in parameters.items() if isinstance(p.default, plain) and n not in NOT_OPTIONS}
    return {n: list(v) if isinstance(v, tuple) else v for n, v in {**shown, **given}.items()}
