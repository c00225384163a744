"""A whole run from a config: prepare, train, record."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedadc.config import Config, load_config
from fedadc.errors import FedadcError
from fedadc.exact import resolve_device, resolve_workers
from fedadc.federation.rounds import RunState
from fedadc.plan import Plan, prepare
from fedadc.record import RunDirectory, check_free, record_of

log = logging.getLogger("fedadc")
Watcher = Callable[[dict[str, Any]], None]  # called with the record of every finished round


@dataclass(frozen=True)
class RunResult:
    """What a run leaves behind."""

    config: Config
    history: list[dict[str, Any]]  # one record per round, as in metrics.jsonl
    state: RunState
    plan: Plan
    out: Path | None

    @property
    def state_dict(self) -> dict[str, torch.Tensor]:
        """The final model by which the run is judged, for `load_state_dict` of your own module."""
        return self.plan.federation.state_dict(self.state)


def run(
    source: Config | Mapping[str, Any] | str | Path,
    overrides: str | Sequence[str] = (),
    *,
    preset: str | Sequence[str] = (),
    out: str | Path | None = None,
    overwrite: bool = False,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    workers: int | str = 0,
    workers_per_gpu: int = 1,
    watch: Watcher | None = None,
    notes: Callable[[str], None] = log.info,
) -> RunResult:
    """Train by a config (a file, a mapping or a `Config`); with `out`, leave a run directory.

    A `preset` (or several) is laid over the config, then `key.sub=value` overrides.
    With `workers`, so many processes train the clients, `auto` as many as the machine likes (see `resolve_workers`);
    0 is this process, and the result is the same.
    `watch` is called with the record of every round, `notes` with what the loader of the data did that one should know.
    """
    presets, changes = ([value] if isinstance(value, str) else value for value in (preset, overrides))
    config = load_config(source, changes, presets=presets)
    if out is not None:
        check_free(Path(out), overwrite)
    device = resolve_device(device)
    count = resolve_workers(workers, device, workers_per_gpu)
    plan = prepare(config, data_dir, device, None if out is None else Path(out), count)
    for note in plan.federation.data.notes:
        notes(note)
    return execute(plan, None if out is None else Path(out), overwrite, device, watch)


def execute(
    plan: Plan, out: Path | None, overwrite: bool = False, device: str = "cpu", watch: Watcher | None = None
) -> RunResult:
    """Train a plan."""
    config, federation = plan.config, plan.federation
    directory = None
    if out is not None:
        directory = RunDirectory(out, config, device, overwrite, federation.data.notes, federation.workers)
    state, history = federation.start(), []
    log.info(
        "training %s on %s, %d clients", config.tree()["method"]["name"], config.data.name, len(federation.clients)
    )
    try:
        for result in federation.rounds(config.rounds, stop_at_accuracy=config.stop.accuracy):
            state = result.state
            history.append(directory.append(result) if directory else record_of(result))
            if watch:
                watch(history[-1])
    except BaseException:  # interrupted, diverged, a bug in a user's method: what was trained so far is kept
        if directory and history:
            with contextlib.suppress(FedadcError):
                directory.finish(federation.models(state))
        elif directory:
            directory.discard()
        raise
    finally:
        federation.close()
    if directory:
        directory.finish(federation.models(state))
    return RunResult(config, history, state, plan, out)
