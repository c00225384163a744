"""Fifty real sites on one machine, some of which misbehave: does the run end, and does the server's memory stay flat?

python benchmarks/load.py [--sites 50] [--rounds 50] [--cohort 10]      (half an hour or more; wants a quiet machine)

One site is ten times slower than the others, one is killed in every third round and started again, and one sends
garbage. At the end, a simulation with the trace of the run must have the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedadc.runs.record import load_config, read_run
from fedadc.runs.runner import run as simulate
from fedadc.sites.local import LocalFederation, environments, free_port
from fedadc.sites.trial import prepared

HOSTILE = Path(__file__).parents[1] / "tests" / "hostile"
SLOW, DYING, GARBAGE = "0", "1", "2"  # names of sites
SLOWER = 30  # seconds that the slow site waits: ten times what a message takes
SITE = "FEDADC_SITE"  # variable by which the processes of a site are found
DEADLINE, QUORUM = 120, 0.6


def config_of(options: argparse.Namespace) -> Any:
    tree = {
        "rounds": options.rounds, "seed": 1,
        "data": {"name": "digits", "clients": options.sites, "partition": {"name": "dirichlet", "alpha": 1.0}},
        "model": {"name": "mlp", "hidden": [256]}, "method": "scaffold", "cohort": {"size": options.cohort},
        "local": {"steps": 4, "batch_size": 16, "lr": 0.1}, "evaluate": {"every": 5},
        "federation": {"quorum": QUORUM, "deadline": DEADLINE, "retries": 2},
    }  # fmt: skip
    return load_config(tree)


def started(federation: LocalFederation, name: str, address: str, rounds: int, folder: Path) -> Any:
    hostile = {"PYTHONPATH": str(HOSTILE), "HOSTILE_FOLDER": str(folder), "HOSTILE_SECONDS": str(SLOWER)}
    attack = {SLOW: "slow", GARBAGE: "garbage"}.get(name)
    variables = hostile | {"HOSTILE": ",".join([attack] * rounds)} if attack else {}
    return federation.start_site(name, address, variables | {SITE: name})


def megabytes(pid: int) -> float:
    with suppress(OSError):
        (line,) = [own for own in Path(f"/proc/{pid}/status").read_text().splitlines() if own.startswith("VmRSS")]
        return int(line.split()[1]) / 1024
    return 0.0


def largest(federation: LocalFederation, program: str) -> float:
    """Megabytes of the largest process of a program."""
    found = []
    for pid in federation.processes():
        with suppress(OSError):
            if program in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                found.append(megabytes(pid))
    return max(found, default=0.0)


def kill(federation: LocalFederation, name: str, node: Any) -> None:
    """A SuperNode and everything that it has started."""
    mine = f"{SITE}={name}"
    for pid, environment in environments():
        if mine in environment and f"FEDADC_FEDERATION={federation.folder}" in environment:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    node.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--cohort", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, config = Path(temporary), config_of(options)
        federation = prepared(folder / "app", config, options.sites)[0]
        address = f"127.0.0.1:{free_port()}"
        try:
            federation.start_link(address)
            sites = {}
            for name in map(str, range(options.sites)):
                sites[name] = started(federation, name, address, options.rounds, folder)
                time.sleep(1.0)  # two cores
            print(f"{options.sites} sites were started", flush=True)
            follow(federation, sites, address, options, folder)
        finally:
            federation.down()
        report(federation, config, folder)


def follow(federation: LocalFederation, sites: Any, address: str, options: argparse.Namespace, folder: Path) -> None:
    """Until the run has ended: memory after every round, and the site that dies."""
    running, seen, metrics = federation.start_run(address), 0, federation.run / "metrics.jsonl"
    while running.poll() is None:
        time.sleep(1)
        rounds = metrics.read_text().count("\n") if metrics.is_file() else 0
        if rounds == seen:
            continue
        seen = rounds
        server, link = largest(federation, "flwr-serverapp"), largest(federation, "flower-superlink")
        record = json.loads(metrics.read_text().splitlines()[-1])
        left_out = [*record.get("dropped", ()), *record.get("skipped", ())]
        memory = f"server {server:.0f} MB, SuperLink {link:.0f} MB"
        print(f"round {rounds}: {record['seconds']:.1f} s, {memory}, did not count: {left_out}", flush=True)
        if rounds % 3 == 0:
            kill(federation, DYING, sites[DYING])
            sites[DYING] = started(federation, DYING, address, options.rounds, folder)


def report(federation: LocalFederation, config: Any, folder: Path) -> None:
    records = read_run(federation.run).records
    seconds = [record["seconds"] for record in records]
    tree: Mapping[str, Any] = config.tree()
    again = {**tree, "federation": None, "faults": {**tree["faults"], "trace": str(federation.run / "trace.jsonl")}}
    simulate(load_config(again), out=folder / "again")
    same = (folder / "again/model.safetensors").read_bytes() == (federation.run / "model.safetensors").read_bytes()
    print(f"{len(records)} rounds, {statistics.median(seconds):.1f} s each (median), {max(seconds):.1f} s at most")
    print(f"uploads that did not count: {sum(len(r.get('dropped', ())) + len(r.get('skipped', ())) for r in records)}")
    print(f"accuracy {records[-1]['test_accuracy']:.3f}; the simulation of its trace has the same model: {same}")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
