"""What a run leaves behind: config.yaml, metrics.jsonl, model.safetensors, environment.json; and how it is read."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedadc.config.settings import Config, parse_config
from fedadc.config.yaml import parse_yaml
from fedadc.errors import FedadcError, require
from fedadc.evaluation.evaluator import reaches
from fedadc.runs.environment import read_facts
from fedadc.runs.layout import CONFIG, METRICS, MODEL, REPLACED, model_file
from fedadc.training.state import Round

log = logging.getLogger("fedadc")


def model_facts(name: str, round: int) -> dict[str, str]:
    """What stands in a model's file beside it. One entry: safetensors writes several in any order."""
    return {"model": f"{name} after round {round}"}


def model_origin(file: Path) -> tuple[str, int]:
    """The name of the model that a run saved in a file, and after which round; nothing for a file of another origin."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            name, _, round = str((opened.metadata() or {}).get("model", "")).partition(" after round ")
            return name, int(round) if round.isdecimal() else 0
    except (SafetensorError, OSError):
        return "", 0


def saved_model(run: RecordedRun, name: str | None = None) -> Path:
    """The file of the model by which a run is judged, or of another one of its models."""
    file = run.path / (MODEL if name is None else model_file(name))
    if name is None:
        why = "the run has not finished, or its method has no global model (local_only)"
    else:
        others = [f.stem.removeprefix("model-") for f in sorted(run.path.glob(model_file("*")))]
        why = f"the run has no model of that name beside its own; it has {', '.join(others) or 'none'}"
    require(file.is_file(), f"{run.path} has no {file.name}: {why}.")
    trained, rounds = model_origin(file)[1], run.records[-1]["round"]
    if trained not in (rounds, 0):  # 0: another's file
        log.warning("%s is of round %d, but %s has come to round %d", file, trained, run.path, rounds)
    return file


def record_of(result: Round) -> dict[str, Any]:
    """One line of metrics.jsonl."""
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
    values |= {k: list(v) for k in ("dropped", "slow", "skipped", "events") if (v := getattr(result, k))}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


@dataclass(frozen=True)
class RecordedRun:
    """A run directory that was read."""

    path: Path
    tree: dict[str, Any]  # its config, as plain values
    records: list[dict[str, Any]]

    def stopped(self) -> bool:
        """Whether it ended early because it was told to."""
        accuracy = (self.tree.get("stop") or {}).get("accuracy")
        return reaches(self.records[-1], accuracy)

    def config(self, without: Sequence[str] = ()) -> Config:
        """The config of the run (some keys left at their defaults), with its files looked up where they were."""
        tree = {k: v for k, v in self.tree.items() if k not in without}
        return parse_config(tree, folder=original_folder(self.path))


def load_config(
    source: Config | Mapping[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    presets: Sequence[str] = (),
) -> Config:
    """A config from a file, a mapping or a `Config`; presets laid over it, then `key.sub=value` overrides; checked.

    Files that the config of a run directory names are looked up where the original config was.
    """
    if folder is None and not isinstance(source, Config | Mapping):
        folder = original_folder(Path(source).resolve().parent)
    return parse_config(source, overrides, folder, presets)


def original_folder(folder: Path) -> Path:
    """The folder of the config from which the run in `folder` was started; `folder` itself if it holds no run."""
    home = read_facts(folder).get("config_folder")
    return Path(home) if isinstance(home, str) else folder


def read_run(path: Path) -> RecordedRun:
    require(path.is_dir(), f"there is no run directory {path}.")
    for name in (CONFIG, METRICS):
        require((path / name).is_file(), f"{path} is not a run directory: it has no {name}.")
    try:
        tree = parse_yaml((path / CONFIG).read_text(encoding="utf-8"), str(path / CONFIG))
        lines = (path / METRICS).read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise FedadcError(f"{path} cannot be read ({error}).") from error
    require(isinstance(tree, dict), f"{path / CONFIG} is not a config.")
    records: list[dict[str, Any]] = []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # its process was killed while it wrote it
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FedadcError(f"{path / METRICS}, line {number} is damaged ({error}).") from error
        require(
            isinstance(record, dict)
            and isinstance(record.get("round"), int)
            and isinstance(record.get("cohort", []), list)
            and all(isinstance(record.get(k, 0), int) for k in ("bytes_up", "bytes_down")),
            f"{path / METRICS}, line {number} is not the record of a round.",
        )
        before = records[-1]["round"] if records else 0
        require(record["round"] > before, f"{path / METRICS}, line {number} is of round {record['round']} again.")
        records.append(record)
    waiting = (
        f"; the run that it replaces waits below it, in a folder {REPLACED}…" if any(path.glob(f"{REPLACED}*")) else ""
    )
    require(bool(records), f"{path} holds no finished round yet{waiting}.")
    return RecordedRun(path, tree, records)
