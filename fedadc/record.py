"""The run directory: config.yaml, metrics.jsonl, model.safetensors, environment.json."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedadc
from fedadc.config import Config, home_of, load_config
from fedadc.errors import FedadcError, require
from fedadc.evaluate import reaches
from fedadc.federation.rounds import Round
from fedadc.federation.store import FILES as STATES
from fedadc.tree import parse_yaml

CONFIG, METRICS, MODEL, ENVIRONMENT = "config.yaml", "metrics.jsonl", "model.safetensors", "environment.json"
LOCK = ".lock"
FILES = (CONFIG, METRICS, MODEL, ENVIRONMENT)


def record_of(result: Round) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    values: dict[str, Any] = {
        "round": result.round,
        "lr": result.lr,
        "train_loss": result.train_loss,
        **result.metrics,
        "cohort": list(result.cohort),
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "seconds": round(result.seconds, 6),
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class RunDirectory:
    """Writes a run as it goes. Created only when everything that can be checked has been."""

    def __init__(
        self,
        path: Path,
        config: Config,
        device: str,
        overwrite: bool = False,
        notes: Sequence[str] = (),
        workers: int = 0,
    ) -> None:
        check_free(path, overwrite)
        self.path = path
        self._replaced: Path | None = None  # where the run that stood here waits until this one has a round
        with self._writing():
            path.mkdir(parents=True, exist_ok=True)
            self._held = ExitStack()
            self._held.enter_context(locked(path))
            self._put_aside()
            write_text(path / CONFIG, config.yaml())
            facts = {
                **environment(device),
                "workers": workers,
                "config_folder": str(config.folder),
                "data_notes": list(notes),
            }
            write_text(path / ENVIRONMENT, json.dumps(facts, indent=2) + "\n")
            self._metrics = (path / METRICS).open("w", encoding="utf-8")

    def append(self, result: Round) -> dict[str, Any]:
        record = record_of(result)
        with self._writing():
            self._metrics.write(json.dumps(record, allow_nan=False) + "\n")
            self._metrics.flush()
        return record

    def _put_aside(self) -> None:
        old = [file for file in self.path.iterdir() if _is_of_a_run(file) and file.name != LOCK]
        if old:
            self._replaced = Path(
                tempfile.mkdtemp(prefix=f".{self.path.name}-replaced-", dir=self.path.resolve().parent)
            )
            for file in old:
                file.replace(self._replaced / file.name)

    def finish(self, models: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """Write the models: the first, by which the run is judged, under the plain name."""
        from safetensors.torch import save

        with self._writing():
            self._metrics.close()
            for index, (name, state_dict) in enumerate(models.items()):
                partial = self.path / (MODEL + ".part")
                partial.write_bytes(save(state_dict, metadata={"model": name}))
                partial.replace(self.path / (model_file(name) if index else MODEL))
            if self._replaced:
                shutil.rmtree(self._replaced, ignore_errors=True)
        self._held.close()

    def discard(self) -> None:
        """Take back a run that never finished a round, and bring back the one that it was to replace."""
        self._metrics.close()
        self._held.close()
        _clear(self.path)
        with suppress(OSError):
            if self._replaced:
                for file in self._replaced.iterdir():
                    file.replace(self.path / file.name)
                self._replaced.rmdir()
            else:
                self.path.rmdir()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FedadcError(f"cannot write to {self.path} ({error.strerror or error}).") from error


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse a place that holds something; with `overwrite`, only something other than a run."""
    try:
        require(not path.exists() or path.is_dir(), f"{path} is a file; --out needs a folder.")
        held = list(path.iterdir()) if path.is_dir() else []
    except (OSError, ValueError) as error:
        raise FedadcError(f"--out: {str(path)[:60]} is no usable folder ({error}).") from error
    if not held:
        return
    require(overwrite, f"{path} is not empty; choose another --out, or give --overwrite to replace the run in it.")
    foreign = [p.name for p in held if not _is_of_a_run(p)]
    require(
        not foreign, f"{path} holds {', '.join(sorted(foreign)[:3])}, which is not part of a run; choose another --out."
    )


def model_file(name: str) -> str:
    """Where a model beside the judged one is saved."""
    return f"model-{name}.safetensors"


def _is_of_a_run(file: Path) -> bool:
    if file.is_dir():
        return file.name.startswith(STATES)
    return file.name.removesuffix(".part") in (*FILES, LOCK) or file.name == model_file(_model_in(file))


def _model_in(file: Path) -> str:
    """The name of the model that a run saved in a file; nothing for a file of another origin."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return str((opened.metadata() or {}).get("model", ""))
    except (SafetensorError, OSError):
        return ""


def _clear(path: Path) -> None:
    """Remove what a run left in a folder."""
    for file in path.iterdir():
        if file.is_dir() and _is_of_a_run(file):
            shutil.rmtree(file, ignore_errors=True)
        elif _is_of_a_run(file):
            file.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else writes to a folder meanwhile. The lock goes with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # a system without it
            pass
        except OSError:
            raise FedadcError(f"another process is writing to {folder}; wait for it or choose another --out.") from None
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def environment(device: str) -> dict[str, Any]:
    """What a result depends on beside its config."""
    return {
        "fedadc": fedadc.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl_cbwr": os.environ.get("MKL_CBWR"),
        "device": device,
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    """Commit of the folder the command ran in, and whether it held changes; None outside a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


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
        return load_config({k: v for k, v in self.tree.items() if k not in without}, folder=home_of(self.path))


def read_run(path: Path) -> RecordedRun:
    require(path.is_dir(), f"there is no run directory {path}.")
    for name in (CONFIG, METRICS):
        require((path / name).is_file(), f"{path} is not a run directory: it has no {name}.")
    try:
        tree = parse_yaml((path / CONFIG).read_text(encoding="utf-8"), str(path / CONFIG))
        lines = (path / METRICS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FedadcError(f"{path} cannot be read ({error}).") from error
    require(isinstance(tree, dict), f"{path / CONFIG} is not a config.")
    records = []
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
        records.append(record)
    require(bool(records), f"{path} holds no finished round yet.")
    return RecordedRun(path, tree, records)
