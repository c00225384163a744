"""Read run directories: config.yaml, metrics.jsonl and model.safetensors; also the format of their records."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedadc.config.settings import Config, changed_config, parse_config
from fedadc.config.yaml import parse_yaml, read_yaml
from fedadc.data.dataset import Dataset
from fedadc.errors import DataError, DiskError, FedadcError, kind_of_failure, require
from fedadc.evaluation.metrics import Evaluation
from fedadc.evaluation.stopping import Stopping, stop_reason
from fedadc.fields.summary import summary
from fedadc.runs.environment import read_facts, text_of
from fedadc.runs.layout import BEST_MODEL, CONFIG, METRICS, MODEL, REPLACED, model_file, other_models
from fedadc.runs.seal import code_of_run, is_run
from fedadc.system.user_code import Notes, UserCode
from fedadc.tasks import SCORES
from fedadc.training.state import Round

log = logging.getLogger("fedadc")
# keys that neither the data nor a saved model depends on; user code that they name may be gone, and is not loaded
TRAINING_ONLY = ("method", "objective", "local", "cohort", "communication", "clock", "stop", "checkpoint")


def model_facts(name: str, round: int, note: str = "") -> dict[str, str]:
    """The metadata of a model file. It has one entry, since safetensors writes several in arbitrary order."""
    return {"model": f"{name} after round {round}{f', {note}' if note else ''}"}


def model_origin(file: Path) -> tuple[str, int]:
    """The name of the model that a run saved in a file, and its round; "" and 0 if no run saved this file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            name, _, rest = str((opened.metadata() or {}).get("model", "")).partition(" after round ")
            round = rest.partition(",")[0]
            return name, int(round) if round.isdecimal() else 0
    except (SafetensorError, OSError):
        return "", 0


def saved_model(run: RecordedRun, name: str | None = None) -> Path:
    """The file of the model by which a run is judged, or of the model with the given name."""
    file = run.path / (MODEL if name is None else model_file(name))
    if not file.is_file():
        if name is None:
            reason = "the run has not finished, or its method has no global model (local_only)"
        else:
            others = ", ".join(other_models(run.path))
            reason = f"the other models of this run are: {others}" if others else "this run has no other models"
        kind = DataError if name is None else FedadcError
        raise kind(f"{run.path} has no {file.name}: {reason}.")
    round, last = model_origin(file)[1], run.records[-1]["round"]
    if round not in (last, 0) and file.name != BEST_MODEL:  # 0: the file was not saved by a run
        log.warning("%s was saved after round %d, but %s is at round %d", file, round, run.path, last)
    return file


def record_of(result: Round) -> dict[str, Any]:
    """The record of a round: one line of metrics.jsonl."""
    values: dict[str, Any] = {
        "round": result.round,
        "lr": result.lr,
        "train_loss": result.train_loss,
        **result.metrics,
        "cohort": list(result.cohort),
        "samples": result.samples,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "ledger": result.ledger.record(),
        "seconds": round(result.seconds, 6),
    }
    if result.virtual_seconds is not None:
        values["virtual_seconds"] = result.virtual_seconds
    values |= {
        k: list(v) for k in ("dropped", "slow", "skipped", "joined", "absent", "events") if (v := getattr(result, k))
    }
    if result.stopped:
        values["stopped"] = result.stopped
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def scores(record: Mapping[str, Any]) -> dict[str, Any]:
    """The scores and losses in the record of a round."""
    return {name: value for name, value in record.items() if name.endswith((*SCORES, "mae", "loss"))}


@dataclass(frozen=True)
class RecordedRun:
    """The content of a run directory."""

    path: Path
    tree: dict[str, Any]  # the config, as plain values
    records: list[dict[str, Any]]

    def __repr__(self) -> str:
        last = self.records[-1] if self.records else {}
        return summary("RecordedRun", {"path": self.path, "round": last.get("round"), **scores(last)})

    def stopped(self) -> bool:
        """True if the run has ended early as its settings in `stop` say."""
        try:
            stop, evaluate = Stopping(**self.tree.get("stop") or {}), Evaluation(**self.tree.get("evaluate") or {})
            return bool(stop_reason(stop, evaluate, int(self.tree.get("rounds", 0)), self.records))
        except (FedadcError, TypeError, ValueError):  # not a config of this version
            return False

    def config(self, without: Sequence[str] = (), trust: bool = False, notes: Notes = log.info) -> Config:
        """The config of the run, without some keys. Its files are searched in the folder of the original config."""
        return parse_config(self.tree, code_of_run(self.path, self.tree, notes, trust), without=without)


def load_config(
    source: Config | Mapping[str, Any] | str | Path,
    overrides: str | Sequence[str] = (),
    folder: Path | None = None,
    presets: str | Sequence[str] = (),
    *,
    without: Sequence[str] = (),
    trust: bool = False,
    notes: Notes = log.info,
) -> Config:
    """Read and check a config from a file, a mapping or a `Config`; apply presets, then `key.sub=value` overrides.

    If the config is that of a run directory, its files are searched in the folder of the original config. User code is
    loaded from there if it is as the run has sealed it, or with `trust`. `without` leaves out keys that are not needed.
    """
    overrides, presets = ([value] if isinstance(value, str) else value for value in (overrides, presets))
    valid = isinstance(source, Config | Mapping | str | Path)
    require(valid, f"a config must be a file, a mapping or a Config, not {source!r:.60}.")
    if isinstance(source, Config):
        return changed_config(source, overrides, presets)
    if isinstance(source, Mapping):
        tree, code = source, UserCode(folder or Path.cwd(), notes)
    else:
        tree, home = read_yaml(Path(source)), Path(source).resolve().parent
        from_run = folder is None and is_run(home)
        code = code_of_run(home, tree, notes, trust) if from_run else UserCode(folder or home, notes)
    return parse_config(tree, code, overrides, presets, without, str(source))


def recorded_config(
    path: Path, trust: bool = False, notes: Notes = log.info, given: Mapping[str, Any] | None = None
) -> Config:
    """The config of the run in a directory; `given` are classes that need not be loaded, by their module:Name."""
    require(path.is_dir(), f"there is no run directory {path}.")
    require((path / CONFIG).is_file(), f"{path} is not a run directory: it has no {CONFIG}.")
    try:
        tree = read_yaml(path / CONFIG)
    except DiskError:
        raise
    except FedadcError as error:  # a config that was good when the run was started
        raise DataError(str(error)) from error
    return parse_config(tree, code_of_run(path, tree, notes, trust, given), source=str(path / CONFIG))


def require_same_split(run: Path, config: Config, data: Dataset) -> None:
    """Refuse to measure an old run on samples that it was trained on.

    Versions before 0.3 held out other samples of data that names its clients.
    """
    facts = read_facts(run)
    begun = facts.get("begun")
    version = text_of(begun if isinstance(begun, dict) else facts, "fedadc") or ""
    other = version.startswith(("0.1.", "0.2.")) and data.owners is not None and isinstance(config.data.test, float)
    require(
        not other,
        f"{run} was trained by version {version}, which held out other test samples of data that names its clients, so "
        "what are test samples now may have been trained on; use that version, or give test samples of your own.",
    )


def read_run(path: Path) -> RecordedRun:
    require(path.is_dir(), f"there is no run directory {path}.")
    for name in (CONFIG, METRICS):
        require((path / name).is_file(), f"{path} is not a run directory: it has no {name}.")
    try:
        tree = parse_yaml((path / CONFIG).read_text(encoding="utf-8"), str(path / CONFIG))
        lines = (path / METRICS).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise kind_of_failure(error)(f"{path} cannot be read ({error}).") from error
    except FedadcError as error:  # not valid YAML
        raise DataError(str(error)) from error
    require(isinstance(tree, dict), f"{path / CONFIG} is not a config.", DataError)
    records: list[dict[str, Any]] = []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # incomplete: the process was killed while writing this line
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path / METRICS}, line {number} is damaged ({error}).") from error
        require(
            isinstance(record, dict)
            and isinstance(record.get("round"), int)
            and isinstance(record.get("cohort", []), list)
            and all(isinstance(record.get(k, 0), int) for k in ("bytes_up", "bytes_down")),
            f"{path / METRICS}, line {number} is not the record of a round.",
            DataError,
        )
        previous = records[-1]["round"] if records else 0
        require(
            record["round"] > previous,
            f"{path / METRICS}, line {number} is round {record['round']}, which must be greater than {previous}.",
            DataError,
        )
        records.append(record)
    if not records:
        replaced = any(path.glob(f"{REPLACED}*"))
        hint = f"; the run that it replaces is in its subfolder {REPLACED}…" if replaced else ""
        raise DataError(f"{path} has no finished round yet{hint}.")
    return RecordedRun(path, tree, records)


def is_finished(path: Path, config: Config) -> bool:
    """True if the run in a directory has trained all rounds of this config, and has its final model."""
    try:
        records = read_run(path).records
    except FedadcError:
        return False
    last = records[-1]
    # The model of an earlier round was saved at an interruption; 0: the file does not say its round.
    is_final = (path / MODEL).is_file() and model_origin(path / MODEL)[1] in (last["round"], 0)
    saved = is_final or not config.method.federated
    return saved and (last["round"] == config.rounds or ended_early(config, records) != "")


def ended_early(config: Config, records: Sequence[Mapping[str, Any]]) -> str:
    """Why the run with these records has ended before its last round; empty if it has not."""
    return stop_reason(config.stop, config.evaluate, config.rounds, records)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories at these paths or up to two levels below; an experiment has a folder for each of its runs."""
    found: list[Path] = []
    for path in paths:
        if (path / METRICS).is_file() or not path.is_dir():
            found.append(path)
            continue
        below = sorted(f.parent for depth in ("*", "*/*") for f in path.glob(f"{depth}/{METRICS}"))
        # A run that is being replaced is kept inside its successor until that is finished: leave it out.
        below = [p for p in below if p.parent not in below]
        if not below:
            raise FedadcError(f"{path} is not a run directory and contains none.")
        found += below
    return found
