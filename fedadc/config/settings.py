"""The settings of a run as dataclasses that validate themselves. `fedadc init` writes a commented example."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from fedadc.communication.clock import DISTRIBUTIONS, Clock, Distribution
from fedadc.communication.downlinks import DOWNLINKS, Downlink
from fedadc.communication.network import Communication
from fedadc.communication.uplinks import UPLINKS, Uplink
from fedadc.config.presets import apply_preset
from fedadc.config.schema import Schema, Tables, known_name, name_in
from fedadc.config.yaml import override
from fedadc.data import DATASETS
from fedadc.data.batches import Augment
from fedadc.errors import FedadcError, one_line, require, spelled
from fedadc.evaluation.metrics import Evaluation
from fedadc.evaluation.stopping import Stopping
from fedadc.fields.settings import Settings
from fedadc.fields.summary import field_summary, summary
from fedadc.methods import METHODS, PAIRS, FedAvg, Method
from fedadc.models import MODELS
from fedadc.objectives import DEFAULT_OBJECTIVES, OBJECTIVES, CrossEntropy, Objective
from fedadc.optimizers import OPTIMIZERS, Optimizer
from fedadc.partitions import PARTITIONS, Partition
from fedadc.schedules import SCHEDULES, Schedule
from fedadc.selections import SELECTIONS, Selection, Uniform
from fedadc.system.user_code import UserCode
from fedadc.tasks import Classification
from fedadc.training.client_states import Storage
from fedadc.training.coordinator import Weighting
from fedadc.training.ensembles import Ensembles
from fedadc.training.faults import Faults
from fedadc.views.local_work import MOST, LocalWork

TABLES: Tables = {
    Method: METHODS,
    Objective: OBJECTIVES,
    Partition: PARTITIONS,
    Schedule: SCHEDULES,
    Optimizer: OPTIMIZERS,
    Selection: SELECTIONS,
    Downlink: DOWNLINKS,
    Uplink: UPLINKS,
    Distribution: DISTRIBUTIONS,
}
PAIR_NAMES: dict[type, tuple[str, ...]] = {Method: tuple(PAIRS)}  # short names for a method with its objective
STUDIES = {"experiment": {"base", "runs"}, "sweep": {"search"}}  # command -> keys that only its files have
Init = Literal["default", "kaiming"]
TaskName = Literal["classification", "regression"]
AT_SITES = "sites"  # data.name in the config of a real federation: every site has its own


@dataclass(frozen=True, kw_only=True)
class Normalize(Settings):
    """Mean and standard deviation per channel, for inputs that are scaled to [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.mean) == len(self.std) > 0, "mean and std need as many values, and at least one.")
        require(all(0 < s < math.inf for s in self.std), "std must be above 0 and finite.")
        require(all(map(math.isfinite, self.mean)), "mean must be finite.")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """The data set, and how it is partitioned among the clients."""

    name: str  # a name of `fedadc list datasets`, or module:function returning a Dataset
    path: str | None = None  # npz, folder, csv: your file or folder
    test: float | str | None = None  # a file or folder, or a stratified share if the data set has no test data
    validation: float | None = None  # a stratified share of the training data, for choosing settings
    clients: int | None = None  # number of clients; natural and pooled partitions determine it themselves
    partition: Partition | None = None  # None: natural if the data set has client ids, else iid
    seed: int | None = None  # for the partition and the held-out shares; None: the run's seed
    normalize: Normalize | None = None  # None: the constants that the loader provides
    augment: Augment = field(default_factory=Augment)
    options: dict[str, Any] = field(default_factory=dict, metadata={"rest": True})  # arguments of the loader

    __repr__ = field_summary

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "name", known_name("data", self.name, {**DATASETS, AT_SITES: None}))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """The model and its initial weights."""

    name: str  # a name of `fedadc list models`, or module:Name of a class or function that makes a torch module
    head: str | None = None  # the layer whose output is the logits; None: the module's `head`, if it has one
    seed: int | None = None  # for the initial weights; None: the run's seed
    init: Init | None = None  # None: the model's preferred initialization
    weights: str | None = None  # a safetensors file to start from
    channels_last: bool | None = None  # memory format of images, which changes bits; None: the faster one
    options: dict[str, Any] = field(default_factory=dict, metadata={"rest": True})  # arguments of the constructor

    __repr__ = field_summary

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "name", known_name("model", self.name, MODELS))


@dataclass(frozen=True, kw_only=True)
class CohortConfig(Settings):
    """Client selection in each round, and the weights of the uploads."""

    size: int | None = None
    ratio: float | None = None  # C in the paper; without size and ratio, all clients are selected
    selection: Selection = field(default_factory=Uniform)
    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.size is None or self.ratio is None, "set size or ratio, not both; leave the other one empty.")


@dataclass(frozen=True, kw_only=True)
class Checkpointing(Settings):
    """How often a checkpoint is written, and what is kept beside the last model."""

    every: int | None = None  # rounds; None: by time, see seconds
    seconds: float = 30.0  # time between checkpoints; longer if writing them would take more than 2 % of the run's time
    best: bool | None = None  # keep the best model by validation data; None: if there is such data and a global model

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every is None or self.every >= 1, f"every must be at least 1, not {self.every}.")
        require(0 <= self.seconds < math.inf, f"seconds must be 0 or more and finite, not {self.seconds}.")


@dataclass(frozen=True, kw_only=True)
class PersonalConfig(Settings):
    """How every site tunes the final model on its own data, as `fedadc personalize` does it for a simulation."""

    regularizers: tuple[str, ...] = ("none",)
    layers: Literal["head", "all"] = "head"
    epochs: int = 2
    lr: float | None = None  # None: local.lr
    mu: float | None = None
    lam: float | None = None


@dataclass(frozen=True, kw_only=True)
class FederationConfig(Settings):
    """Real sites, as `fedadc federation` reaches them. Simulations ignore these settings."""

    sites: int | tuple[str, ...] | None = None  # how many take part, or their names in the order of their numbers
    evaluate: Literal["sites", "server", "both"] = "sites"  # who has test data: the sites hold out theirs
    patience: float = 600.0  # seconds to wait for a site before the run ends with a checkpoint
    quorum: float | None = None  # share of a cohort whose uploads are enough at the deadline; None: all must answer
    deadline: float | None = None  # seconds until a round ends; None: `patience`
    retries: int = 0  # how often sites that have not answered are asked again, if there is no quorum at the deadline
    open: bool = False  # whether sites may join and leave between rounds
    at_once: int | None = None  # how many sites work at the same time; None: all that are asked
    personalize: PersonalConfig | None = None  # None: the sites get the final model as it is

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(self.sites) if isinstance(self.sites, tuple) else self.sites
        require(count is None or count >= 1, f"sites must be a number from 1 on, or names, not {self.sites}.")
        if isinstance(self.sites, tuple):
            twice = [name for name in self.sites if self.sites.count(name) > 1]
            require(not twice, f"sites has the name {twice[0] if twice else ''} twice.")
        require(0 < self.patience < math.inf, f"patience must be above 0 seconds and finite, not {self.patience}.")
        require(self.quorum is None or 0 < self.quorum <= 1, f"quorum must be a share in (0, 1], not {self.quorum}.")
        require(not self.open or self.quorum is not None, "open needs a quorum: sites may leave during a round.")
        valid = self.deadline is None or 0 < self.deadline < math.inf
        require(valid, f"deadline must be above 0 seconds and finite, not {self.deadline}.")
        require(0 <= self.retries <= 1000, f"retries must be in 0..1000, not {self.retries}.")
        limited = self.quorum is not None or self.deadline is not None
        require(not self.retries or limited, "retries need a deadline or a quorum: without them, all are waited for.")
        require(self.at_once is None or self.at_once >= 1, f"at_once must be a number from 1 on, not {self.at_once}.")


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """All settings of a run."""

    seed: int = 0
    rounds: int = field(metadata={"example": "60"})
    label: str | None = None  # name of this run in tables and plots
    data: DataConfig = field(metadata={"example": "{name: digits, clients: 10}"})
    task: TaskName | None = None  # what the labels are; None: classes
    model: ModelConfig = field(metadata={"example": "{name: mlp, hidden: [64]}"})
    method: Method = field(default_factory=FedAvg)
    objective: Objective = field(default_factory=CrossEntropy)
    local: LocalWork = field(default_factory=LocalWork)
    cohort: CohortConfig = field(default_factory=CohortConfig)
    evaluate: Evaluation = field(default_factory=Evaluation)
    stop: Stopping = field(default_factory=Stopping)
    faults: Faults = field(default_factory=Faults)
    ensembles: Ensembles = field(default_factory=Ensembles)
    communication: Communication = field(default_factory=Communication)
    clock: Clock | None = None
    storage: Storage = field(default_factory=Storage)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    federation: FederationConfig | None = None
    folder: Path = field(default=Path(), metadata={"config": False}, compare=False)  # searched first for files
    # where user code comes from; set once the config is checked
    code: UserCode | None = field(default=None, metadata={"config": False}, compare=False, repr=False)

    @property
    def task_name(self) -> str:
        """The task, whether or not it is given."""
        return self.task or Classification.name

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rounds >= 1, f"rounds must be at least 1, not {self.rounds}.")
        require(self.rounds <= MOST, f"rounds must be at most {MOST}, not {self.rounds}.")
        require(0 <= self.seed < 2**63, f"seed must be in 0..2^63-1, not {self.seed}.")

    def __repr__(self) -> str:
        """The choices that name a run; `yaml()` has all settings."""
        names = {"data": self.data.name, "clients": self.data.clients, "model": self.model.name}
        facts = {"label": self.label, "rounds": self.rounds, "seed": self.seed, **names}
        return summary("Config", {**facts, "method": self.method, "objective": self.objective})

    @property
    def schema(self) -> Schema:
        return Schema(TABLES, self.code or UserCode(self.folder), PAIR_NAMES)

    def tree(self) -> dict[str, Any]:
        """This config as plain values; `parse_config` converts them back."""
        tree: dict[str, Any] = self.schema.dump(self)
        return tree

    def classes(self) -> dict[str, type]:
        """The classes of this config's nodes, by the names under which `tree` has them."""
        return {
            name_in(table, type(node)): type(node)
            for node in _nodes(self)
            for base, table in TABLES.items()
            if isinstance(node, base)
        }

    def yaml(self) -> str:
        return yaml.safe_dump(self.tree(), sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)

    def file(self, name: str) -> Path:
        """The path of a file named in the config: in the config's folder, else in the current directory."""
        try:
            path = Path(name).expanduser()
            return path if path.exists() and not (self.folder / path).exists() else self.folder / path
        except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown ~user, a NUL byte
            raise FedadcError(f"{name[:60]} is not a usable path ({one_line(error)}).") from error


def parse_config(
    tree: Mapping[str, Any],
    code: UserCode,
    overrides: Sequence[str] = (),
    presets: Sequence[str] = (),
    without: Sequence[str] = (),
    source: str = "this",
) -> Config:
    """Check a config given as plain values; apply presets, then `key.sub=value` overrides; leave out some keys."""
    tree = dict(tree)
    for preset in presets:
        tree = apply_preset(tree, preset)
    for change in overrides:
        tree = override(tree, change)
        pair = change.startswith("method") and spelled(str(_node(tree, "method").get("name")), PAIRS) in PAIRS
        if pair and spelled(str(_node(tree, "objective").get("name")), OBJECTIVES) == "cross_entropy":
            del tree["objective"]  # the objective of the pair replaces the default loss in the file
    require_no_study(tree, source, "experiment", "sweep")
    tree = {key: value for key, value in tree.items() if key not in without}
    if tree.get("objective") is None and tree.get("task") == "regression":
        tree["objective"] = DEFAULT_OBJECTIVES["regression"]
    try:
        config = Schema(TABLES, code, PAIR_NAMES).build(Config, _expand_pairs(tree))
    except RecursionError:
        raise FedadcError("the config is nested too deeply.") from None
    return replace(config, folder=code.folder, code=code)


def require_no_study(tree: Mapping[str, Any], source: str, *studies: str) -> None:
    """Refuse the file of another command."""
    for study in studies:
        article = "an" if study[0] in "aeiou" else "a"
        require(
            not STUDIES[study] <= tree.keys(), f"{source} is {article} {study}; run it with `fedadc {study} {source}`."
        )


def changed_config(config: Config, overrides: Sequence[str] = (), presets: Sequence[str] = ()) -> Config:
    """A config with presets and overrides applied, and checked; itself if there are none and it was checked before.

    Classes that are in the config as Python objects are kept and not looked up.
    """
    if config.code is not None and not overrides and not presets:
        return config
    known = config.code or UserCode(config.folder)
    classes = {n: cls for n, cls in config.classes().items() if f"{cls.__module__}.py" not in known.files}
    given = {**known.given, **classes}
    code = replace(known, folder=config.folder, given=given, used={}, files=dict(known.files))
    return parse_config(config.tree(), code, overrides, presets)


def _nodes(value: Any) -> Iterator[Any]:
    """A node of a config and all nodes below."""
    if is_dataclass(value) and not isinstance(value, type):
        yield value
        for f in fields(value):
            if f.metadata.get("config", True):
                yield from _nodes(getattr(value, f.name))


def _expand_pairs(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the short name of a pair, such as `method: fedadc+`, by its method and objective."""
    method, objective = _node(tree, "method"), _node(tree, "objective")
    pair = spelled(str(method.get("name")), PAIRS)
    if pair not in PAIRS:
        return dict(tree)
    method_name, objective_name = PAIRS[pair]
    require(
        spelled(str(objective.get("name", objective_name)), OBJECTIVES) == objective_name,
        f"method {pair} includes objective {objective_name}; remove objective {objective.get('name')}, or set method: "
        f"{method_name} to keep it.",
    )
    return {**tree, "method": {**method, "name": method_name}, "objective": {**objective, "name": objective_name}}


def _node(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A node of the tree as a mapping, also if it is written as a bare name."""
    node = tree.get(key)
    return dict(node) if isinstance(node, Mapping) else {} if node is None else {"name": node}
