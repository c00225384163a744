"""Simulation on Ray: its cost beside worker processes, the bytes between nodes, and a model of the time per round.

python benchmarks/cluster.py overhead   W1, W2, W2b on one node; W2 beside Flower's own Ray simulation (a few minutes)
python benchmarks/cluster.py bytes      bytes between nodes, in network namespaces (Linux, root; some minutes)
python benchmarks/cluster.py model      seconds per round with limited links, the fitted model, 8, 64 and 512 nodes

Nodes are raylets on this machine, each in a network namespace of its own; `tc` limits their links.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ours import METHODS, dataset
from peers import installed, python_of
from scipy.optimize import nnls
from workloads import LR, load_tensors, make_model, mlp, workload

import fedadc
from fedadc.cluster.settings import RayCluster

HEAD = "10.77.0.1"
PORT = 6379
PAIRS = {"W1": 3, "W2": 40, "W2b": 20}  # rounds of each engine, in turn
RAY = str(Path(sys.executable).with_name("ray"))


def federation(
    name: str, method: Any = None, hidden: int = 0, cohort: int = 0, clients: int | None = None, **engine: Any
) -> fedadc.Federation:
    w = workload(name)
    work = fedadc.LocalWork(epochs=w.epochs, batch_size=w.batch, lr=LR)
    torch.manual_seed(0)
    model = mlp(784, hidden, hidden, 10) if hidden else make_model(name)
    return fedadc.Federation(
        test=0, model=model, data=dataset(*(part[:clients] for part in load_tensors(name))), local=work,
        method=method or METHODS["fedadc"], cohort=cohort or w.cohort, **engine,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- beside worker processes


def overhead() -> None:
    for name, rounds in PAIRS.items():
        engines = {"workers": {"workers": 2}, "ray": {"engine": RayCluster(workers=2)}}
        trained = {label: federation(name, **settings) for label, settings in engines.items()}
        streams = {label: f.rounds(rounds + 2) for label, f in trained.items()}
        seconds: dict[str, list[float]] = {label: [] for label in engines}
        for _ in range(rounds + 2):  # in turn, so that both see the same machine
            for label, stream in streams.items():
                began = time.perf_counter()
                next(stream)
                seconds[label].append(time.perf_counter() - began)
        for each in trained.values():
            each.close()
        timed = {label: found[2:] for label, found in seconds.items()}
        ratio = statistics.median(r / w for r, w in zip(timed["ray"], timed["workers"], strict=True))
        best = {label: min(found) for label, found in timed.items()}
        print(
            f"{name}: workers {statistics.median(timed['workers']):.3f} s (min {best['workers']:.3f}), ray "
            f"{statistics.median(timed['ray']):.3f} s (min {best['ray']:.3f}), median of ratios {ratio:.3f}, ratio of "
            f"minima {best['ray'] / best['workers']:.3f}, first round on Ray {seconds['ray'][0]:.1f} s",
            flush=True,
        )
    if installed("flw"):
        done = subprocess.run(
            [python_of("flw"), "peer_flower.py", "W2"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
        print("Flower on W2:", done.stdout.strip().splitlines()[-1] if done.stdout else done.stderr[-500:])


# --------------------------------------------------------------------------------------------------- several nodes


@contextmanager
def cluster(nodes: int, megabits: float | None = None) -> Iterator[None]:
    """Nodes of one CPU in network namespaces that a bridge connects, with limited links."""

    def ip(*words: object) -> None:
        subprocess.run(["ip", *map(str, words)], check=True)

    names, started = [f"fedadc{i}" for i in range(nodes)], []
    ip("link", "add", "fedadcbr", "type", "bridge")
    ip("link", "set", "fedadcbr", "up")
    try:
        for i, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"fav{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"fav{i}", "master", "fedadcbr", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            if megabits:
                limit = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "256k", "latency", "400ms"]
                subprocess.run(["tc", "qdisc", "add", "dev", f"fav{i}", *limit], check=True)
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit], check=True)
            where = ["--head", f"--port={PORT}"] if i == 0 else [f"--address={HEAD}:{PORT}"]
            where += ["--include-dashboard=false"] if i == 0 else []
            command = [RAY, "start", *where, f"--node-ip-address=10.77.0.{i + 1}", "--num-cpus=1", "--block"]
            command += [f"--object-store-memory={400 * 2**20}", "--disable-usage-stats"]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append(subprocess.Popen(["ip", "netns", "exec", name, *command], start_new_session=True, **quiet))
            time.sleep(6 if i == 0 else 2)
        time.sleep(4)
        yield
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait()
        time.sleep(2)
        for name in names:
            subprocess.run(["ip", "netns", "del", name])
        subprocess.run(["ip", "link", "del", "fedadcbr"])


def sent_between_nodes(nodes: int) -> int:
    """Bytes that the nodes have sent to each other: what came from them at the bridge."""
    return sum(int(Path(f"/sys/class/net/fav{i}/statistics/rx_bytes").read_text()) for i in range(nodes))


@dataclass(frozen=True)
class Setting:
    method: str = "fedadc"
    hidden: int = 200
    cohort: int = 100
    rounds: int = 12
    workload: str = "W2"
    clients: int | None = None  # None: all


def rounds_of(setting: Setting, nodes: int) -> list[dict[str, Any]]:
    """Train on a running cluster, from its head; one record per round: seconds, bytes, the least bytes possible."""
    words = [sys.executable, __file__, "_drive", json.dumps(vars(setting))]
    environment = {**os.environ, "RAY_ADDRESS": f"{HEAD}:{PORT}"}
    driver = subprocess.Popen(
        ["ip", "netns", "exec", "fedadc0", *words], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
        env=environment, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert driver.stdout is not None and driver.stdin is not None
    records, before = [], sent_between_nodes(nodes)
    for line in driver.stdout:
        now = sent_between_nodes(nodes)
        records.append({**json.loads(line), "bytes": now - before})
        before = sent_between_nodes(nodes)
        driver.stdin.write("\n")
        driver.stdin.flush()
    driver.wait()
    return records


def _drive(setting: Setting) -> None:
    """The driver, on the head node. It waits after each round until the bytes are read."""
    method = METHODS.get(setting.method) or fedadc.methods.METHODS[setting.method]()
    engine = RayCluster(address=f"{HEAD}:{PORT}", patience=120)
    trained = federation(setting.workload, method, setting.hidden, setting.cohort, setting.clients, engine=engine)
    seen: dict[str, float] = {}
    _count_bytes(trained.engine, seen)
    for result in trained.rounds(setting.rounds):
        print(json.dumps({"round": result.round, "seconds": result.seconds, **seen}), flush=True)
        seen.clear()
        sys.stdin.readline()
    trained.close()


def _count_bytes(engine: Any, seen: dict[str, float]) -> None:
    """Note what must be sent to and from other nodes: vectors, sums of uploads, and states of clients that move."""
    import ray

    from fedadc.cluster.arrays import bytes_of

    publish, partial, give = engine._publish, engine._partial_sum, engine._actors.give

    def add(name: str, value: float) -> None:
        seen[name] = seen.get(name, 0) + value

    def _publish(name: str, vector: Any) -> Any:
        add("vectors", vector.numel() * vector.element_size())
        return publish(name, vector)

    def _partial_sum(placed: Any) -> Any:
        add("jobs", 1)
        if placed.node != ray.get_runtime_context().get_node_id():
            add("uploads", bytes_of(placed.answer.sum))
        return partial(placed)

    def _give(worker: Any, assignment: Any) -> None:
        clients = getattr(assignment.job, "clients", ())
        moved = [known[client] for client, *_ in clients if client in known and known[client].node != worker.node.id]
        add("states", sum(state.size for state in moved))
        give(worker, assignment)

    known: dict[int, Any] = {}
    run = engine.run

    def _run(broadcast: Any, tasks: Any, states: Any) -> Any:
        known.clear()
        known.update({task.client: states[task.client] for task in tasks if task.client in states})
        return run(broadcast, tasks, states)

    engine._publish, engine._partial_sum, engine._actors.give, engine.run = _publish, _partial_sum, _give, _run


def least_bytes(record: dict[str, Any], nodes: int) -> float:
    return (nodes - 1) * record["vectors"] + record.get("uploads", 0) + record.get("states", 0)


def bytes_between_nodes() -> None:
    print("| nodes | method | cohort | jobs | MB per round | least | ratio |\n|---|---|---|---|---|---|---|")
    for nodes in (2, 4):
        with cluster(nodes):
            for setting in (Setting(), Setting(cohort=10), Setting(method="scaffold", cohort=20)):
                records = rounds_of(setting, nodes)[3:]
                least = sum(least_bytes(record, nodes) for record in records)
                sent, jobs = sum(record["bytes"] for record in records), sum(record["jobs"] for record in records)
                n = len(records)
                print(
                    f"| {nodes} | {setting.method} | {setting.cohort} | {jobs / n:.0f} | {sent / n / 1e6:.2f} | "
                    f"{least / n / 1e6:.2f} | {sent / least:.3f} |",
                    flush=True,
                )


# ---------------------------------------------------------------------------------------------------------- a model


def model() -> None:
    """Fit seconds = a · samples × parameters / workers + b · jobs + c · bytes handled here + d · time on the link."""
    rows, seconds = [], []
    print("| nodes | Mbit/s | parameters | cohort | s per round | model |\n|---|---|---|---|---|---|")
    seen = []
    for nodes, megabits in ((1, None), (2, None), (2, 200), (4, 200)):
        with cluster(nodes, megabits):
            for hidden, cohort in ((50, 40), (200, 100), (600, 40)):
                setting = Setting(hidden=hidden, cohort=cohort, rounds=7, clients=200)
                records = rounds_of(setting, nodes)[3:]
                parameters = 784 * hidden + hidden * hidden + hidden * 10 + 2 * hidden + 10
                work = cohort * 3 * 20 * parameters / min(nodes, 2)
                jobs = statistics.median(r["jobs"] for r in records)
                handled = statistics.median(r["vectors"] + r["jobs"] * 4 * parameters for r in records)
                link = statistics.median(least_bytes(r, nodes) for r in records) if megabits else 0.0
                per_second = link * 8e-6 / megabits if megabits else 0.0
                rows.append([work, jobs, handled, per_second])
                seconds.append(statistics.median(r["seconds"] for r in records))
                seen.append((nodes, megabits or "-", parameters, cohort))
                print(f"measured {seen[-1]}: {seconds[-1]:.3f} s, {rows[-1]}", file=sys.stderr, flush=True)
    scale, weights = np.max(np.abs(rows), axis=0), np.array(seconds)  # relative errors count
    fitted = nnls(np.array(rows) / scale / weights[:, None], np.ones(len(rows)))[0] / scale
    for setting_row, row, took in zip(seen, rows, seconds, strict=True):
        print(f"| {' | '.join(map(str, setting_row))} | {took:.3f} | {float(np.dot(fitted, row)):.3f} |")
    print("coefficients (per sample × parameter, per job, per byte handled, per second on the link):", fitted.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "bytes", "model", "_drive"])
    parser.add_argument("setting", nargs="?")
    given = parser.parse_args()
    if given.what == "_drive":
        _drive(Setting(**json.loads(given.setting)))
    else:
        {"overhead": overhead, "bytes": bytes_between_nodes, "model": model}[given.what]()


if __name__ == "__main__":
    main()
