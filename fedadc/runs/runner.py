"""A whole run from a config: prepare, train, record; and how it goes on after an end before its time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedadc.config.build import Plan, prepare
from fedadc.config.settings import Config
from fedadc.errors import CannotResume, require
from fedadc.evaluation.evaluator import reaches
from fedadc.runs.directory import RunDirectory, is_unstarted, require_empty
from fedadc.runs.environment import Facts, environment, read_facts, text_of
from fedadc.runs.fingerprint import with_horizon_of
from fedadc.runs.layout import CONFIG
from fedadc.runs.record import load_config, record_of
from fedadc.system.determinism import resolve_device, resolve_workers
from fedadc.system.signals import deferred_signals, stopping_on_signals
from fedadc.training.state import RunState

log = logging.getLogger("fedadc")
Watcher = Callable[[dict[str, Any]], None]  # called with the record of every finished round
Notes = Callable[[str], None]


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
    resume: bool = False,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    workers: int | str = 0,
    workers_per_gpu: int = 1,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> RunResult:
    """Train by a config (a file, a mapping or a `Config`); with `out`, leave a run directory.

    A `preset` (or several) is laid over the config, then `key.sub=value` overrides.
    With `resume`, go on with the run in `out` if there is one; what decides its result must be as it was.
    With `workers`, so many processes train the clients, `auto` as many as the machine likes (see `resolve_workers`);
    0 is this process, and the result is the same.
    `watch` is called with the record of every round, `notes` with what one should know of the data and of how it ended.
    """
    presets, changes = ([value] if isinstance(value, str) else value for value in (preset, overrides))
    config, place = load_config(source, changes, presets=presets), None if out is None else Path(out)
    require(not (resume and overwrite), "give --resume or --overwrite, not both.")
    require(not resume or place is not None, "resume needs `out`, the run directory to go on with.")
    first = None
    if place is not None:
        first = _first_config(place) if resume else None
        if first is None and not (resume and is_unstarted(place)):
            require_empty(place, overwrite)
    device = resolve_device(device)
    count = resolve_workers(workers, device, workers_per_gpu)
    plan = prepare(config if first is None else with_horizon_of(first, config), data_dir, device, place, count)
    for note in plan.federation.data.notes:
        notes(note)
    directory = None
    if place is not None:
        facts = _facts(plan, device, data_dir)
        if first is None:
            directory = RunDirectory.begun(place, plan, facts, overwrite)
        else:
            directory = RunDirectory.reopened(place, plan, facts, log.warning)
    return execute(plan, directory, watch, notes)


def resume(
    path: str | Path,
    overrides: str | Sequence[str] = (),
    *,
    data_dir: str | Path | None = None,
    device: str | None = None,
    workers: int | str = 0,
    workers_per_gpu: int = 1,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> RunResult:
    """Go on with the run in a directory, by its own config; `rounds=N` among the overrides prolongs it."""
    place = Path(path)
    require(_first_config(place) is not None, f"{place} holds no run that could go on.")
    facts = read_facts(place)
    return run(
        place / CONFIG,
        overrides,
        out=place,
        resume=True,
        data_dir=data_dir or text_of(facts, "data_dir"),
        device=device or text_of(facts, "device") or "cpu",
        workers=workers,
        workers_per_gpu=workers_per_gpu,
        watch=watch,
        notes=notes,
    )


def _first_config(place: Path) -> Config | None:
    """Of the run in a directory; None where there is nothing."""
    if is_unstarted(place):
        return None
    if not (place / CONFIG).is_file():
        require_empty(place, overwrite=True)  # whether it is a run at all
        raise CannotResume(f"{place} cannot go on: it has no {CONFIG}.")
    return load_config(place / CONFIG)


def _facts(plan: Plan, device: str, data_dir: str | Path | None) -> Facts:
    return {
        **environment(device),
        "workers": plan.federation.workers,
        "config_folder": str(plan.config.folder),
        "data_dir": None if data_dir is None else str(Path(data_dir).expanduser().resolve()),
        "data_notes": list(plan.federation.data.notes),
    }


def execute(
    plan: Plan, directory: RunDirectory | None = None, watch: Watcher | None = None, notes: Notes = log.info
) -> RunResult:
    """Train a plan, from where its directory stands."""
    config, federation = plan.config, plan.federation
    state = federation.start() if directory is None else directory.state
    history = [] if directory is None else directory.history
    log.info(
        "training %s on %s, %d clients", config.tree()["method"]["name"], config.data.name, len(federation.clients)
    )
    ended = bool(history) and (state.round == config.rounds or reaches(history[-1], config.stop.accuracy))
    if ended:
        notes(f"the run has come to its end at round {state.round}; more rounds=N prolong it")
    elif state.round:
        notes(f"going on after round {state.round} of {config.rounds}")
    with stopping_on_signals():
        try:
            if ended and directory is not None and not directory.evaluated:
                directory.amend(federation.evaluator(state))
                history = directory.history
            for result in () if ended else federation.rounds(config.rounds, state, config.stop.accuracy, trusted=True):
                with deferred_signals():
                    if directory is None:
                        history.append(record_of(result))
                    else:
                        directory.append(result)
                state = result.state
                if watch:
                    watch(history[-1])
            if directory is not None:
                directory.finish()
        except (
            BaseException
        ) as reason:  # interrupted, diverged, a full disk, a bug in a user's method: what was trained is kept
            if directory is not None:
                kept = directory.leave(reason)
                with suppress(OSError):  # of a terminal that is gone
                    if kept:
                        notes(kept)
            raise
        finally:
            federation.close()
    return RunResult(config, history, state, plan, None if directory is None else directory.path)
