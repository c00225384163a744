"""The plan of a sweep: its settings, checked before anything runs, and the config of every point."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fedadc.analysis.compare import flatten
from fedadc.config.build import prepare
from fedadc.config.schema import Schema
from fedadc.config.settings import TABLES, Config, parse_config, require_no_study
from fedadc.config.yaml import read_yaml
from fedadc.errors import FedadcError, require, unknown
from fedadc.evaluation.stopping import higher_is_better
from fedadc.fields.settings import Settings
from fedadc.runs.record import load_config
from fedadc.runs.seal import code_of_run, is_run
from fedadc.studies.choosing import require_measured
from fedadc.studies.search import FACTOR, PRUNERS, SAMPLERS, require_optuna
from fedadc.studies.space import (
    Dimension,
    Point,
    ValueRange,
    corners,
    grid,
    one_after_another,
    read_space,
)
from fedadc.system.files import LOCK, PARTIAL, write_text
from fedadc.system.user_code import Notes, UserCode

SWEEP = "sweep.json"  # in the folder of a sweep: its settings
TRIALS_BY_DEFAULT = 20
BATCH_BY_DEFAULT = 4
MOST_PREPARED = 16  # configs that are checked with their data


@dataclass(frozen=True, kw_only=True)
class Sweep(Settings):
    """The content of the file of a sweep."""

    search: dict[str, Any] = field(default_factory=dict)  # key.sub -> list of values, or range
    config: str | None = None  # the config whose keys are swept, beside this file
    base: dict[str, Any] | None = None  # or the config itself
    title: str | None = None
    sampler: str | None = None  # None: grid if no key has a range, else tpe
    pruner: str = "none"
    trials: int | None = None  # settings to try; a grid tries all
    batch: int | None = None  # trials that are asked for and trained together
    rungs: list[int] | None = None  # rounds at which trials may be pruned
    seeds: list[int] = field(default_factory=lambda: [0])  # every setting is trained with every seed
    seed: int = 0  # of the sampler
    choose_by: str = "validation_accuracy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler is not None and self.sampler not in SAMPLERS:
            raise unknown("sampler", self.sampler, SAMPLERS)
        if self.pruner not in PRUNERS:
            raise unknown("pruner", self.pruner, PRUNERS)
        for name in ("trials", "batch"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, not {value}.")
        require(bool(self.seeds), "seeds must name at least one seed.")
        require(len(set(self.seeds)) == len(self.seeds), f"seeds must not name a seed twice: {self.seeds}.")
        require(self.seed >= 0, f"seed must be 0 or more, not {self.seed}.")
        require(
            self.choose_by.startswith("validation_"),
            f"choose_by is {self.choose_by}, but settings are chosen by validation data, never by test data; name a "
            "metric such as validation_accuracy.",
        )
        require(
            self.pruner != "none" or not self.rungs, "rungs are the rounds at which a pruner decides; name a pruner."
        )


@dataclass(frozen=True)
class SweepPlan:
    """A sweep whose open settings are decided."""

    sweep: Sweep
    space: list[Dimension]
    points: list[Point]  # of a grid; a sampler finds its own
    tree: dict[str, Any]  # the config, with the keys that are swept or without them
    code: UserCode
    rounds: int = 0  # of the longest trial

    @property
    def maximize(self) -> bool:
        return higher_is_better(self.sweep.choose_by)

    @property
    def trials(self) -> int:
        return self.sweep.trials or 0

    @property
    def batch(self) -> int:
        return self.sweep.batch or self.trials

    @property
    def rungs(self) -> list[int]:
        return self.sweep.rungs or []

    def config(self, point: Point, seed: int) -> Config:
        """The config of a point, with a seed."""
        changes = [f"{key}={json.dumps(value)}" for key, value in point.items()]
        return parse_config({**self.tree, "seed": seed}, self.code, changes)

    def record(self) -> dict[str, Any]:
        """All that determines the trials, as JSON has it."""
        settings = {k: v for k, v in asdict(self.sweep).items() if k not in ("config", "base", "title", "search")}
        search = {d.key: d.written for d in self.space}
        tree = {**settings, "search": search, "config": self.tree, "code": self.code.files}
        return dict(json.loads(json.dumps(tree, default=str)))


def read_sweep(
    source: Config | Mapping[str, Any] | str | Path,
    search: Mapping[str, Any],
    changes: Mapping[str, Any],
    notes: Notes,
    trust: bool = False,
) -> SweepPlan:
    """The plan of a sweep from its file, or from a config and what to search; `changes` replace settings."""
    sweep, tree, code = _read(source, notes, trust)
    sweep = replace(sweep, search={**sweep.search, **search}, **changes)
    space = read_space(sweep.search)
    sampler = sweep.sampler or ("tpe" if any(isinstance(d, ValueRange) for d in space) else "grid")
    points = grid(space) if sampler == "grid" else []
    require(
        sampler != "grid" or sweep.trials in (None, len(points)),
        f"trials is {sweep.trials}, but the grid has {len(points)} settings and all are tried; leave trials out, or "
        "use the sampler random or tpe.",
    )
    plan = SweepPlan(replace(sweep, sampler=sampler), space, points, tree, code)
    configs = [_checked_config(plan, point) for point in points or corners(space)]
    if sampler != "grid" or sweep.pruner != "none":
        require_optuna()
    batches = sampler == "tpe" or sweep.pruner != "none"  # else nothing depends on batches, and all are trained at once
    trials = len(points) or sweep.trials or TRIALS_BY_DEFAULT
    batch = min(sweep.batch or BATCH_BY_DEFAULT, trials) if batches else trials
    rungs, rounds = _rungs(sweep, configs), max(config.rounds for config in configs)
    return replace(plan, sweep=replace(plan.sweep, trials=trials, batch=batch, rungs=rungs), rounds=rounds)


def _read(
    source: Config | Mapping[str, Any] | str | Path, notes: Notes, trust: bool
) -> tuple[Sweep, dict[str, Any], UserCode]:
    """The settings of a sweep, the config that it changes, and the user code beside this."""
    if isinstance(source, Config):
        config = load_config(source)
        return Sweep(), config.tree(), config.code or UserCode(config.folder, notes)
    valid = isinstance(source, Mapping | str | Path)
    require(valid, f"a sweep must be a file, a mapping or a Config, not {source!r:.60}.")
    tree = dict(source) if isinstance(source, Mapping) else read_yaml(Path(source))
    folder = Path.cwd() if isinstance(source, Mapping) else Path(source).resolve().parent
    require_no_study(tree, "this" if isinstance(source, Mapping) else str(source), "experiment")
    if "rounds" in tree or "search" not in tree:
        return Sweep(), tree, _code(folder, tree, notes, trust)
    sweep = Schema(TABLES, UserCode(folder, notes)).build(Sweep, tree)
    require((sweep.config is None) != (sweep.base is None), "a sweep needs either config (a file) or base (its keys).")
    if sweep.config is None:
        return sweep, sweep.base or {}, UserCode(folder, notes)
    file = folder / sweep.config
    tree = read_yaml(file)
    return sweep, tree, _code(file.resolve().parent, tree, notes, trust)


def _code(folder: Path, tree: Mapping[str, Any], notes: Notes, trust: bool) -> UserCode:
    """The user code beside a config. In a run directory it is only loaded if it is as sealed, or with `trust`."""
    return code_of_run(folder, tree, notes, trust) if is_run(folder) else UserCode(folder, notes)


def _checked_config(plan: SweepPlan, point: Point) -> Config:
    """The config of a point, which can be parsed and measures what settings are chosen by."""
    try:
        config = plan.config(point, plan.sweep.seeds[0])
    except FedadcError as error:
        for d in plan.space:
            if isinstance(d, ValueRange) and not d.whole and str(error).startswith(f"{d.key} must be a whole number"):
                ends = f"{d.key}={d.low:.0f}..{d.high:.0f},int"
                raise FedadcError(f"{d.key} must be a whole number; write its range as {ends}.") from error
        raise
    require(
        config.data.validation is not None,
        "there is no validation data to choose a setting by; set data.validation, e.g. to 0.1.",
    )
    require_measured(config, plan.sweep.choose_by)
    return config


def check_with_data(plan: SweepPlan, data_dir: Path | None) -> None:
    """Check a few configs with their data, so that a mistake is found before anything is trained."""
    for point in islice(one_after_another(plan.space), MOST_PREPARED):
        prepare(plan.config(point, plan.sweep.seeds[0]), data_dir)


def _rungs(sweep: Sweep, configs: Sequence[Config]) -> list[int]:
    """The rounds at which trials may be pruned."""
    rounds, every = max(c.rounds for c in configs), max(c.evaluate.every for c in configs)
    if sweep.pruner == "none":
        return []
    if sweep.pruner == "hyperband":
        first = sweep.rungs[0] if sweep.rungs else max(rounds // FACTOR**2, every, 1)
        rungs = list(_powers(first, rounds))
        require(
            sweep.rungs in (None, rungs[:1], rungs),
            f"rungs of hyperband grow by a factor of {FACTOR}; name the first alone, or {rungs}.",
        )
    else:
        rungs = sweep.rungs or sorted({max(every, rounds * k // 4) for k in (1, 2, 3)} - {rounds})
    require(
        bool(rungs) and rungs == sorted(set(rungs)) and every <= rungs[0] and rungs[-1] < rounds,
        f"rungs must be rising rounds from {every} (the first that is evaluated) to {rounds - 1}, not {rungs}.",
    )
    return rungs


def _powers(first: int, rounds: int) -> Iterator[int]:
    rung = first
    while 0 < rung < rounds:
        yield rung
        rung *= FACTOR


def claim_folder(folder: Path, plan: SweepPlan, notes: Notes) -> None:
    """Write the settings of a sweep to its folder; refuse a folder that has something else."""
    path, record = folder / SWEEP, plan.record()
    if not path.exists():
        foreign = sorted(p.name for p in folder.iterdir() if p.name != LOCK and not p.name.endswith(PARTIAL))
        require(not foreign, f"{folder} contains {', '.join(foreign[:1])} and no sweep; choose another `out`.")
        write_text(path, json.dumps({**record, "optuna": _optuna_version(plan)}, indent=1, ensure_ascii=False) + "\n")
        return
    try:
        known = json.loads(path.read_bytes())
        version = known.pop("optuna")
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise FedadcError(f"{path} does not have the settings of a sweep; choose another `out`.") from None
    before, now = ({".".join(k): json.dumps(v) for k, v in flatten(tree).items()} for tree in (known, record))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    shown = ", ".join(f"{key} {before.get(key, 'absent')}, now {now.get(key, 'absent')}" for key in changed[:3])
    require(not changed, f"{folder} has a sweep of other settings ({shown}); choose another `out`.")
    if version != _optuna_version(plan):
        notes(f"{folder} was begun with Optuna {version}; another version may suggest other settings")


def _optuna_version(plan: SweepPlan) -> str | None:
    if plan.sweep.sampler == "grid" and plan.sweep.pruner == "none":
        return None
    import optuna

    return str(optuna.__version__)
