"""What runs will cost on this machine: FLOPs, bytes, memory and seconds, from a short calibration.

Runs whose steps cost the same share one calibration, also if they differ in seed, rounds, learning rate, partition or
cohort. It runs in a process of its own, so that its memory can be measured. Who takes part in which round, on how many
samples, and what is sent is played through (`workload`). So FLOPs and bytes are exact, except that runs which differ
in their seed alone are counted with the clients of the first.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedadc.config.build import build_coordinator, complete, load_data
from fedadc.config.settings import Config
from fedadc.data import DATASETS
from fedadc.data.dataset import Dataset
from fedadc.data.loaders.download import find
from fedadc.data.loaders.facts import FACTS, stand_in
from fedadc.data.roster import Roster
from fedadc.engines.pool import require_may_start_processes
from fedadc.errors import DataError, WorkersLost, explained, require, same_kind
from fedadc.evaluation.evaluator import models_of
from fedadc.partitions import deal
from fedadc.runs.record import load_config
from fedadc.studies.calibration import Bench, Costs, calibrate
from fedadc.studies.workload import MOST_PLAYED, Workload, play
from fedadc.system.processes import blocked_interrupts, context, start_process_server
from fedadc.system.signals import SIGNALS, stopping_on_signals
from fedadc.training.coordinator import Coordinator

LIMIT = 900.0  # seconds of one calibration; a large table may have to be read for it
GRACE = 10.0  # seconds until a killed process is gone
# what does not change the cost of a step: it changes how many there are, or nothing
NO_COST = {
    "": ("seed", "rounds", "label", "cohort", "stop", "faults", "clock", "storage", "checkpoint"),
    "data": ("partition", "clients", "seed"),
    "model": ("seed",),
    "local": ("steps", "epochs", "lr", "schedule"),
    "evaluate": ("every", "last", "metrics", "overlap"),
    "communication": ("downlink",),
}
ROUGHLY = ("method", "objective", "local", "ensembles")  # of their numbers it matters whether they are 0, 1 or others
WORK = ("data.partition", "data.clients", "cohort", "faults", "local.steps", "local.epochs", "communication.downlink")


@dataclass(frozen=True)
class Estimate:
    """What a run costs as a whole, training and evaluation."""

    flops: float
    bytes_up: int
    bytes_down: int
    memory: int  # bytes, at the peak of a process that trains it
    seconds: float  # on this machine, in one process (workers=0) with a core of its own


def estimate(
    configs: Sequence[Config], data_dir: Path | None = None, watch: Callable[[int, int], None] | None = None
) -> list[Estimate]:
    """Estimate what runs cost; data that is not on this machine is replaced by random samples of its kind.

    `watch` is called with the number of calibrations that are done and that there are.
    """
    groups: dict[str, list[int]] = {}
    for number, config in enumerate(configs):
        groups.setdefault(cost_key(config), []).append(number)
    found: dict[int, Estimate] = {}
    with stopping_on_signals():
        for done, numbers in enumerate(groups.values()):
            if watch is not None:
                watch(done, len(groups))
            members = [configs[number] for number in numbers]
            trees = [config.tree() for config in members]
            found |= zip(numbers, _in_own_process(trees, members[0].folder, data_dir), strict=True)
    if watch is not None:
        watch(len(groups), len(groups))
    return [found[number] for number in range(len(configs))]


def cost_key(config: Config) -> str:
    """A text that runs have in common if their steps cost the same."""
    tree = config.tree()
    for node, names in NO_COST.items():
        inner = tree if not node else tree.get(node) or {}
        for name in names:
            inner.pop(name, None)
    for node in ROUGHLY:
        tree[node] = _rough(tree.get(node))
    return json.dumps([str(config.folder), tree], sort_keys=True, default=str)


def _rough(value: Any) -> Any:
    """The same, with every number that has a fraction replaced."""
    if isinstance(value, Mapping):
        return {name: _rough(inner) for name, inner in value.items()}
    return "a number" if isinstance(value, float) and value not in (0, 1) else value


def _work_key(config: Config) -> str:
    """A text that runs of one calibration have in common if they do as much in a round."""
    tree, values = config.tree(), []
    for name in WORK:
        node: Any = tree
        for part in name.split("."):
            node = (node or {}).get(part)
        values.append(node)
    return json.dumps(values, default=str)


def _in_own_process(trees: list[dict[str, Any]], folder: Path, data_dir: Path | None) -> list[Estimate]:
    """The estimates of configs that share a calibration. The process is gone afterwards, whatever happens."""
    require_may_start_processes()
    start_process_server("fedadc.engines.worker", __name__)
    ours, theirs = context().Pipe(duplex=False)
    process = context().Process(target=_serve, args=(theirs, trees, folder, data_dir), daemon=True)  # type: ignore[attr-defined]
    try:
        with blocked_interrupts(*SIGNALS):
            process.start()
        theirs.close()
        require(ours.poll(LIMIT), f"a calibration takes longer than {LIMIT:.0f} seconds.", WorkersLost)
        answer = ours.recv()
    except (OSError, EOFError) as error:
        process.join(GRACE)
        how = f"with exit code {process.exitcode}" if process.exitcode is not None else str(error)
        raise WorkersLost(f"the process of a calibration ended {how}; memory may be short.") from error
    finally:
        ours.close()
        if process.pid is not None:
            process.kill()
            process.join(GRACE)
    if isinstance(answer, Exception):
        raise answer
    return list(answer)


def _serve(pipe: Connection, trees: list[dict[str, Any]], folder: Path, data_dir: Path | None) -> None:
    """The whole life of the process of a calibration."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer: list[Estimate] | Exception
    try:
        configs = [load_config(tree, folder=folder, notes=lambda _: None) for tree in trees]
        answer = estimates(configs, data_dir)
    except Exception as error:
        known = explained(error)
        bug = RuntimeError(f"a calibration failed:\n{traceback.format_exc()}")
        answer = bug if known is None else same_kind(known, str(known))  # of a class that can be unpickled
    pipe.send(answer)


def _end_with_parent() -> None:
    """A killed parent cannot end this process."""
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def estimates(configs: Sequence[Config], data_dir: Path | None) -> list[Estimate]:
    """Estimates of configs that share a calibration, measured in this process, which is not as it was afterwards."""
    began = time.process_time()
    provide_stand_in(configs[0].data.name, data_dir)
    first, data = load_data(complete(configs[0]), data_dir)
    loading = time.process_time() - began
    bench, costs = calibrate(first, data)
    works: dict[str, list[Config]] = {}
    for config in configs:
        works.setdefault(_work_key(config), []).append(config)
    found: dict[str, tuple[Coordinator, Workload]] = {}
    for key, alike in works.items():
        coordinator = _coordinator(complete(alike[0]), data, bench)
        found[key] = coordinator, play(coordinator, costs.message, max(config.rounds for config in alike))
    return [_estimate(config, bench, costs, *found[_work_key(config)], loading) for config in configs]


def provide_stand_in(name: str, data_dir: Path | None) -> None:
    """Let a data set that is not on this machine be replaced in this process, if it is a known one."""
    if name in FACTS:
        try:
            find(name, data_dir)
        except DataError:
            DATASETS[name] = partial(stand_in, name)


def _coordinator(config: Config, data: Dataset, bench: Bench) -> Coordinator:
    """The server's half of a run, with the clients that the run has."""
    seed = config.seed if config.data.seed is None else config.data.seed
    clients = deal(data, config.data.partition, config.data.clients, seed)
    roster = Roster(
        clients.sizes,
        reported=lambda: data.label_counts(clients),
    )
    agreement = replace(bench.agreement, seed=config.seed, work=config.local)
    return build_coordinator(replace(config, clock=None), agreement, roster)  # virtual time costs none


def _estimate(
    config: Config, bench: Bench, costs: Costs, coordinator: Coordinator, workload: Workload, loading: float
) -> Estimate:
    """Put the costs of the parts together."""
    total = partial(workload.total, rounds=config.rounds)
    names = ("visits", "samples", "touched")
    first = [total(f"first_{name}") for name in names]
    later = [total(name) - some for name, some in zip(names, first, strict=True)]
    taught = costs.first.touched * first[2] + costs.later.touched * later[2]  # FLOPs
    counted, batches = _evaluated(config, bench, coordinator, workload)
    updates = 2 if coordinator.replica is not None else 1  # clients repeat the server's
    kept = min(total("known") * costs.state, config.storage.memory_gb * 1e9)
    return Estimate(
        flops=costs.first.of(*first) + costs.later.of(*later) + counted * costs.counted_flops,
        bytes_up=total("bytes_up"),
        bytes_down=total("bytes_down"),
        memory=int(costs.memory + kept + coordinator.cohort * costs.state),  # a round's new states beside the old ones
        seconds=loading
        + config.rounds * (updates * costs.update + workload.seconds)
        + (total("visits") * costs.visit + total("steps") * costs.step + total("samples") * costs.sample)
        + taught * costs.teacher
        + (batches * costs.counted_batch + counted * costs.counted_sample),
    )


def _evaluated(config: Config, bench: Bench, coordinator: Coordinator, workload: Workload) -> tuple[int, int]:
    """The samples and the batches of all evaluations of a run."""
    method, size = bench.agreement.method, config.evaluate.batch_size
    splits = [len(samples) for samples in bench.counter.splits.values()]
    rounds = config.evaluate.rounds_due(config.rounds)
    evaluations = len(rounds)
    models = 0 if method.headless else evaluations * len(_models(coordinator))
    if not method.federated:  # every client that has a model, and the initial one for all others
        each = [min(workload.total("known", t) + 1, len(coordinator.roster)) for t in rounds[:MOST_PLAYED]]
        models = sum(each) + (evaluations - len(each)) * each[-1]
    samples, batches = models * sum(splits), models * sum(-(-samples // size) for samples in splits)
    if method.personalized:  # every client's own model on its share
        samples += evaluations * sum(splits)
        batches += evaluations * sum(min(samples, len(coordinator.roster)) for samples in splits)
    return samples, batches


def _models(coordinator: Coordinator) -> Mapping[str, Any]:
    """The global models that are evaluated."""
    return models_of(coordinator.server.method, coordinator.server.ensembles, coordinator.start())
