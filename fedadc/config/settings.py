"""One validated tree for a run. `fedadc init` writes a commented example."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from fedadc.communication.clock import DISTRIBUTIONS, Clock, Distribution
from fedadc.communication.downlinks import DOWNLINKS, Downlink
from fedadc.communication.network import Communication
from fedadc.communication.uplinks import UPLINKS, Uplink
from fedadc.config.presets import apply_preset
from fedadc.config.schema import Schema, Tables
from fedadc.config.yaml import override, read_yaml
from fedadc.data.batches import Augment
from fedadc.errors import FedadcError, one_line, require
from fedadc.evaluation.metrics import Evaluation
from fedadc.methods import METHODS, PAIRS, FedAvg, Method
from fedadc.objectives import OBJECTIVES, CrossEntropy, Objective
from fedadc.partitions import PARTITIONS, Partition
from fedadc.schedules import SCHEDULES, Schedule
from fedadc.selections import SELECTIONS, Selection, Uniform
from fedadc.training.client_states import Storage
from fedadc.training.ensembles import Ensembles
from fedadc.training.faults import Faults
from fedadc.training.rounds import Weighting
from fedadc.views.local_work import MOST, LocalWork

TABLES: Tables = {
    Method: METHODS,
    Objective: OBJECTIVES,
    Partition: PARTITIONS,
    Schedule: SCHEDULES,
    Selection: SELECTIONS,
    Downlink: DOWNLINKS,
    Uplink: UPLINKS,
    Distribution: DISTRIBUTIONS,
}
SHORT: dict[type, tuple[str, ...]] = {Method: tuple(PAIRS)}  # names that are short for a pair
Init = Literal["default", "kaiming"]


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
    channels_last: bool | None = None  # how images lie in memory; None: as is quicker (part of the result's bits)
    options: dict[str, Any] = field(default_factory=dict, metadata={"rest": True})  # the model's own


@dataclass(frozen=True, kw_only=True)
class CohortConfig:
    """Who takes part in a round, and what weight an upload has."""

    size: int | None = None
    ratio: float | None = None  # C; without either, all clients take part
    selection: Selection = field(default_factory=Uniform)
    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        require(
            self.size is None or self.ratio is None,
            "give cohort.size or cohort.ratio, not both (null switches one off).",
        )


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """How often a run is saved."""

    every: int | None = None  # rounds; None: by time
    seconds: float = 30.0  # by time: so many after the last, but never more than 2 % of the run's time

    def __post_init__(self) -> None:
        require(self.every is None or self.every >= 1, f"checkpoint.every must be at least 1, not {self.every}.")
        require(
            0 <= self.seconds < float("inf"), f"checkpoint.seconds must be 0 or more and finite, not {self.seconds}."
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
    faults: Faults = field(default_factory=Faults)
    ensembles: Ensembles = field(default_factory=Ensembles)
    communication: Communication = field(default_factory=Communication)
    clock: Clock | None = None
    storage: Storage = field(default_factory=Storage)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    folder: Path = field(default=Path(), metadata={"config": False}, compare=False)  # where files are looked up first

    def __post_init__(self) -> None:
        require(self.rounds >= 1, f"rounds must be at least 1, not {self.rounds}.")
        require(self.rounds <= MOST, f"rounds must be at most {MOST}, not {self.rounds}.")
        require(0 <= self.seed < 2**63, f"seed must lie in 0..2^63-1, not {self.seed}.")

    @property
    def schema(self) -> Schema:
        return Schema(TABLES, self.folder, SHORT)

    def tree(self) -> dict[str, Any]:
        """Plain values that `parse_config` turns into this config again."""
        tree: dict[str, Any] = self.schema.dump(self)
        return tree

    def yaml(self) -> str:
        return yaml.safe_dump(self.tree(), sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)

    def file(self, name: str) -> Path:
        """A file that the config names: beside the config, else where the command runs."""
        try:
            path = Path(name).expanduser()
            return path if path.exists() and not (self.folder / path).exists() else self.folder / path
        except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown ~user, a NUL
            raise FedadcError(f"{name[:60]} is no usable path ({one_line(error)}).") from error


def parse_config(
    source: Config | Mapping[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    presets: Sequence[str] = (),
) -> Config:
    """A config from a file, a mapping or a config; presets laid over it, then `key.sub=value` overrides; checked."""
    if isinstance(source, Config):
        tree, folder = source.tree(), source.folder
    elif isinstance(source, Mapping):
        tree, folder = dict(source), folder or Path.cwd()
    else:
        tree, folder = read_yaml(Path(source)), folder or Path(source).resolve().parent
    for preset in presets:
        tree = apply_preset(tree, preset)
    for change in overrides:
        tree = override(tree, change)
        pair = change.startswith("method") and str(_node(tree, "method").get("name")) in PAIRS
        if pair and _node(tree, "objective").get("name") == "cross_entropy":
            del tree["objective"]  # the file's plain loss gives way to the pair's
    require(
        not {"budget", "runs"} <= tree.keys(), f"{source} is an experiment; run it with `fedadc experiment {source}`."
    )
    try:
        config = Schema(TABLES, folder, SHORT).build(Config, _expand_pairs(tree))
    except RecursionError:
        raise FedadcError("the config is nested too deeply.") from None
    return replace(config, folder=folder)


def _expand_pairs(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`method: fedadc+` is short for a method and an objective."""
    method, objective = _node(tree, "method"), _node(tree, "objective")
    short = method.get("name")
    if not isinstance(short, str) or short not in PAIRS:
        return dict(tree)
    name, wanted = PAIRS[short]
    require(
        objective.get("name", wanted) == wanted,
        f"method {short} brings objective {wanted}; remove objective {objective.get('name')}, or write method: {name} "
        "to keep it.",
    )
    return {**tree, "method": {**method, "name": name}, "objective": {**objective, "name": wanted}}


def _node(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A node that may be written as a bare name."""
    node = tree.get(key)
    return dict(node) if isinstance(node, Mapping) else {} if node is None else {"name": node}
