"""Train a run from a config, record it in a run directory, and resume it after an interruption."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedadc.cluster.settings import RayCluster, cluster_of
from fedadc.config.build import Plan, TrainingPlan, prepare
from fedadc.config.settings import Config
from fedadc.errors import RunDamaged, StatesLost, require
from fedadc.evaluation.frames import History
from fedadc.fields.summary import summary
from fedadc.runs.best import BestModel, best_of
from fedadc.runs.directory import RunDirectory, is_unstarted, require_empty
from fedadc.runs.environment import Facts, environment, read_facts, text_of
from fedadc.runs.fingerprint import with_original_horizon
from fedadc.runs.layout import CONFIG, RAY_LOGS
from fedadc.runs.record import ended_early, load_config, record_of, recorded_config, scores
from fedadc.runs.seal import require_unchanged_code
from fedadc.system.determinism import resolve_device, resolve_workers
from fedadc.system.signals import deferred_signals, stopping_on_signals
from fedadc.training.state import Round, RunState

log = logging.getLogger("fedadc")
Watcher = Callable[[dict[str, Any]], None]  # called with the record of every finished round
Notes = Callable[[str], None]
MOST_ATTEMPTS = 3  # to continue from the same checkpoint after a cluster has lost states


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    config: Config
    history: History  # one record per round, as in metrics.jsonl; `.to_pandas()`
    state: RunState
    plan: TrainingPlan
    out: Path | None
    best: BestModel | None = None  # by validation data, where it is kept (`checkpoint.best`)

    def __repr__(self) -> str:
        names = {"data": self.config.data.name, "method": type(self.config.method).__name__}
        last = scores(self.history[-1]) if self.history else {}
        return summary("RunResult", {**names, "round": self.state.round, **last, "out": self.out})

    @property
    def stopped(self) -> str:
        """Why the run has ended before its last round; empty if it has not."""
        return ended_early(self.config, self.history)

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
    trust: bool = False,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    workers: int | str = 0,
    workers_per_gpu: int = 1,
    engine: RayCluster | str | None = None,
    until: int | None = None,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> RunResult:
    """Train from a config (a file, a mapping or a `Config`); with `out`, write a run directory.

    A `preset` (or several) is applied to the config first, then `key.sub=value` overrides.
    With `resume`, resume the run in `out` if there is one; the settings that determine its result must be unchanged.
    With `trust`, load the user code that a run directory names also where its seal does not allow it.
    `workers` is the number of processes that train the clients; `auto` chooses it (see `resolve_workers`), and 0 trains
    in this process. With `engine`, "ray" or a `RayCluster`, a Ray cluster trains the clients. The result depends on
    neither.
    With `until`, the run pauses after that round; resumed later, it gives the bits of a run that never paused.
    `watch` is called with the record of every round, `notes` with messages about the data and the progress of the run.
    """
    config = load_config(source, overrides, presets=preset, trust=trust, notes=notes)
    require(out is None or isinstance(out, str | Path), f"out must be a path, not {out!r:.60}.")
    path = None if out is None else Path(out)
    require(not (resume and overwrite), "use `resume` or `overwrite`, not both.")
    require(until is None or until >= 1, f"until must be a round from 1 on, not {until!r:.60}.")
    require(not resume or path is not None, "resume needs `out`, the run directory to resume.")
    original = None
    if path is not None:
        original = original_config(path, config, trust) if resume else None
        if original is None and not (resume and is_unstarted(path)):
            require_empty(path, overwrite)
    device = resolve_device(device)
    plan = _plan(config, original, path, data_dir, device, workers, workers_per_gpu, engine)
    if original is not None and path is not None and not trust:
        require_unchanged_code(path, config)
    return train_plan(plan, original, path, overwrite, device, data_dir, watch, notes, until)


def resume(
    path: str | Path,
    overrides: str | Sequence[str] = (),
    *,
    trust: bool = False,
    data_dir: str | Path | None = None,
    device: str | None = None,
    workers: int | str = 0,
    workers_per_gpu: int = 1,
    engine: RayCluster | str | None = None,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> RunResult:
    """Resume the run in a directory from its own config; a larger `rounds=N` in the overrides extends it.

    User code is loaded if it is as the run has sealed it, or with `trust`.
    """
    original = recorded_config(Path(path), trust, notes)
    config = load_config(original, overrides)
    return resume_config(
        config, original, Path(path), data_dir, device, workers, workers_per_gpu, engine, watch=watch, notes=notes
    )


def resume_config(
    config: Config,
    original: Config,
    path: Path,
    data_dir: str | Path | None = None,
    device: str | None = None,
    workers: int | str = 0,
    workers_per_gpu: int = 1,
    engine: RayCluster | str | None = None,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> RunResult:
    """Resume the run in a directory, whose config is `original`, with a config that may differ in some settings."""
    facts = read_facts(path)
    data_dir = data_dir or text_of(facts, "data_dir")
    device = resolve_device(device or text_of(facts, "device") or "cpu")
    plan = _plan(config, original, path, data_dir, device, workers, workers_per_gpu, engine)
    return train_plan(plan, original, path, False, device, data_dir, watch, notes)


def original_config(path: Path, config: Config, trust: bool) -> Config | None:
    """The config of the run in a directory; None if no run was started there.

    It is only compared with the user's own config, so it needs no classes but those that this one has.
    """
    if is_unstarted(path):
        return None
    if not (path / CONFIG).is_file():
        require_empty(path, overwrite=True)  # reports a folder that is no run directory at all
        raise RunDamaged(f"{path} cannot be resumed: it has no {CONFIG}.")
    return recorded_config(path, trust, given=config.classes())


def _plan(
    config: Config,
    original: Config | None,
    path: Path | None,
    data_dir: str | Path | None,
    device: str,
    workers: int | str,
    workers_per_gpu: int,
    engine: RayCluster | str | None,
) -> Plan:
    cluster = cluster_of(engine, workers)
    if cluster is not None and path is not None:
        cluster = replace(cluster, logs=path / RAY_LOGS)
    count = 0 if cluster else resolve_workers(workers, device, workers_per_gpu)
    if original is not None:
        config = with_original_horizon(config, original)
    return prepare(config, data_dir, device, path, count, cluster)


def train_plan(
    plan: TrainingPlan,
    original: Config | None,
    path: Path | None,
    overwrite: bool,
    device: str,
    data_dir: str | Path | None,
    watch: Watcher | None,
    notes: Notes,
    until: int | None = None,
) -> RunResult:
    """Train a plan from its start, or from the state of the run in `path` whose config is `original`."""
    for note in plan.federation.notes:
        notes(note)
    if plan.federation.slow_start:
        notes(plan.federation.slow_start)
    if path is None:
        return execute(plan, None, watch, notes, until)
    facts, attempts = _facts(plan, device, data_dir), Counter[int]()
    if original is None:
        directory = RunDirectory.create(path, plan, facts, overwrite)
    else:
        directory = RunDirectory.reopen(path, plan, facts, log.warning, original)
    while True:
        try:
            return execute(plan, directory, watch, notes, until)
        except StatesLost as lost:  # the rounds since the last checkpoint are trained again, with the same bits
            attempts[directory.checkpoints.round] += 1
            if attempts[directory.checkpoints.round] == MOST_ATTEMPTS:
                raise
            log.warning("%s The run goes back to round %d.", lost, directory.checkpoints.round)
            directory = RunDirectory.reopen(path, plan, facts, log.warning)


def _facts(plan: TrainingPlan, device: str, data_dir: str | Path | None) -> Facts:
    return {
        **environment(device),
        **plan.federation.engine_facts,
        "config_folder": str(plan.config.folder.resolve()),
        "data_dir": None if data_dir is None else str(Path(data_dir).expanduser().resolve()),
        "data_notes": list(plan.federation.notes),
    }


def execute(
    plan: TrainingPlan,
    directory: RunDirectory | None = None,
    watch: Watcher | None = None,
    notes: Notes = log.info,
    until: int | None = None,
) -> RunResult:
    """Train a plan; with `directory`, continue after its last recorded round and write the results there."""
    config, federation = plan.config, plan.federation
    state = federation.start() if directory is None else directory.state
    history = [] if directory is None else directory.history
    clients, method = len(federation.coordinator.roster), config.tree()["method"]["name"]
    log.info("training %s on %s, %d clients", method, config.data.name, clients)
    best = best_of(plan) if directory is None else directory.best
    done = _is_done(config, state.round, history, notes)
    with stopping_on_signals():
        try:
            if done and directory is not None and not directory.last_round_evaluated:
                directory.add_to_last_record(federation.evaluator(state))
                history = directory.history
            done = done or (until is not None and state.round >= until)
            for result in () if done else _up_to(until, _rounds(plan, state, history)):
                with deferred_signals():
                    if directory is None:
                        history.append(record_of(result))
                        if best is not None:
                            best.see(result.state, history[-1])
                    else:
                        directory.append(result)
                state = result.state
                if watch:
                    _show(watch, history[-1])
            if directory is not None:
                directory.finish()
        except BaseException as reason:  # a signal, divergence, a full disk, a bug in user code: keep what was trained
            if directory is not None:
                message = directory.save_after_interruption(reason)
                with suppress(OSError):  # the terminal may be closed
                    if message and not isinstance(reason, StatesLost):
                        notes(message)
            raise
        finally:
            federation.close()
    return RunResult(config, History(history), state, plan, None if directory is None else directory.path, best)


def _is_done(config: Config, round: int, history: Sequence[Mapping[str, Any]], notes: Notes) -> bool:
    """True if a run is finished after a round; says so, or that it goes on."""
    early = ended_early(config, history) if history and round < config.rounds else ""
    if early:
        notes(f"the run is already finished at round {round}: {early}; with other settings in `stop` it goes on")
    elif history and round == config.rounds:
        notes(f"the run is already finished at round {round}; a larger rounds=N extends it")
    elif round:
        notes(f"resuming after round {round} of {config.rounds}")
    return bool(history) and (round == config.rounds or early != "")


def _rounds(plan: TrainingPlan, state: RunState, history: Sequence[Mapping[str, Any]]) -> Iterator[Round]:
    """The rounds of a plan after a state, whose records so far are `history`."""
    config = plan.config
    return plan.federation.rounds(config.rounds, state, trusted=True, stop=config.stop, history=history)


def _up_to(until: int | None, stream: Iterator[Round]) -> Iterator[Round]:
    """The same rounds, at most to round `until`. It has no reference to the state at the start, which may be large."""
    for result in stream:
        yield result
        if result.round == until:
            return


def _show(watch: Watcher, record: dict[str, Any]) -> None:
    try:
        watch(record)
    except Exception as error:  # the run is saved, as after any other failure
        error.add_note(f"raised by `watch` after round {record['round']}")
        raise
