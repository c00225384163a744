"""The trials of a sweep as a file: a line of JSON for each, in their order. It is all that a sweep remembers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedadc.errors import DataError, FedadcError, require
from fedadc.fields.settings import Settings
from fedadc.studies.space import Dimension, ValueList
from fedadc.system.files import read_regular, write_text

TRIALS = "trials.jsonl"  # in the folder of a sweep
TrialStatus = Literal["running", "finished", "pruned", "diverged"]


@dataclass(frozen=True, kw_only=True)
class SweepTrial(Settings):
    """One setting of a sweep, trained with every seed."""

    trial: int  # number, from 0
    settings: dict[str, Any]  # key -> value
    state: TrialStatus = "running"
    rungs: dict[str, float] = field(default_factory=dict)  # round -> mean over seeds of the last evaluated value
    score: float | None = None  # mean over seeds; what the choice is made by
    values: dict[str, list[float]] = field(default_factory=dict)  # metric -> final value of each seed; test: unused
    optuna: dict[str, Any] = field(default_factory=dict)  # what a pruner notes of a trial


def write_trials(folder: Path, trials: Sequence[SweepTrial]) -> None:
    lines = (json.dumps(asdict(trial), ensure_ascii=False, allow_nan=False) for trial in trials)
    write_text(folder / TRIALS, "".join(f"{line}\n" for line in lines))


def read_trials(folder: Path, space: Sequence[Dimension]) -> list[SweepTrial]:
    """The trials so far; none before the first are written."""
    path = folder / TRIALS
    if not path.exists():
        return []
    try:
        lines = read_regular(path, "trials").decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is damaged ({error}).") from error
    return [_trial(line, number, space, f"{path}, line {number + 1}") for number, line in enumerate(lines)]


def _trial(line: str, number: int, space: Sequence[Dimension], where: str) -> SweepTrial:
    try:
        trial = SweepTrial(**json.loads(line))
    except (ValueError, TypeError, RecursionError, FedadcError) as error:
        raise DataError(f"{where} is not a trial of a sweep ({error}).") from error
    known = trial.settings.keys() == {d.key for d in space} and all(_possible(d, trial.settings[d.key]) for d in space)
    complete = (trial.state == "finished") == (trial.score is not None) and all(map(str.isdecimal, trial.rungs))
    require(trial.trial == number and known and complete, f"{where} is not trial {number} of this sweep.", DataError)
    return trial


def _possible(dimension: Dimension, value: Any) -> bool:
    if isinstance(dimension, ValueList):
        return dimension.index(value) is not None
    kind = int if dimension.whole else int | float
    return isinstance(value, kind) and not isinstance(value, bool) and dimension.low <= value <= dimension.high
