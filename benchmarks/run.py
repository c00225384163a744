"""`make bench`: fedadc beside the plain loop and the bare limit; `make bench-peers`: other simulators (--peers) too.

Every system runs as a process of its own, one after another, repeat by repeat (so a machine that gets slower does so
for all), each on a quiet machine where possible. What counts is the minimum of seconds per round over all repeats;
the spread says how far the repeats' own minima lie apart. Prints tables and the list of targets, and writes both and
all raw figures to results/. A system that fails once is shown as failed, never as a number.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import machine, machine_line, result_name, tree, wait_until_quiet
from peers import PEERS, installed, python_of
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS, cache_folder, workload

from tables import Sheet, Target, markdown, sheet_of, targets_of

HERE = Path(__file__).resolve().parent
DISTURBED = 0.2  # cores that others use while it runs, at most, else it runs again
SYSTEMS: dict[str, tuple[str | None, list[str]]] = {  # name: environment (None: ours), command; {} is the workload
    "ours: FedAvg, 2 workers": (None, ["ours.py", "{}", "fedavg", "2"]),
    "ours: FedADC, 2 workers": (None, ["ours.py", "{}", "fedadc", "2"]),
    "ours: FedAvg, in-process": (None, ["ours.py", "{}", "fedavg", "0"]),
    "plain loop": (None, ["plain.py", "{}", "plain"]),
    "bare limit": (None, ["plain.py", "{}", "limit"]),
    "pfl-research": ("pfl", ["peer_pfl.py", "{}"]),
    "pfl-research, 2 processes": (
        "pfl",
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "peer_pfl.py", "{}"],
    ),
    "Flower": ("flw", ["peer_flower.py", "{}"]),
    "fluke": ("flk", ["peer_fluke.py", "{}"]),
}
CHECKS = {  # name: command, seconds until it is given up
    "plus W1": (["checks.py", "plus", "W1"], 900),
    "plus W2": (["checks.py", "plus", "W2"], 300),
    "many clients": (["checks.py", "million", "1000000"], 300),
    "few clients": (["checks.py", "million", "1000"], 300),
    "help": (["checks.py", "help"], 120),
    "first round": (["checks.py", "first"], 300),
}


@dataclass
class Job:
    """One thing to measure, and what came of it in each repeat."""

    name: str  # of the check, or workload/system
    command: list[str]
    limit: int
    repeats: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None
    took: float | None = None  # seconds, the last time


class NoFigures(Exception):
    """A job that failed, in a few words."""


def jobs_of(names: list[str], with_peers: bool, checks: bool) -> list[Job]:
    there = {env: installed(env) for env in PEERS} if with_peers else {}
    jobs = []
    for name in names:
        for system, (env, command) in SYSTEMS.items():
            if (env and not with_peers) or (name == "W1" and system.endswith("in-process")):
                continue
            python = str(python_of(env)) if env else sys.executable
            job = Job(f"{name}/{system}", [python, *(part.format(name) for part in command)], workload(name).limit)
            job.failure = None if env is None or there[env] else "not installed"
            jobs.append(job)
    if checks:
        jobs += [Job(name, [sys.executable, *command], limit) for name, (command, limit) in CHECKS.items()]
    return jobs


def execute(job: Job) -> dict[str, Any]:
    """Run a job in a session of its own, which is ended as a whole if it takes too long or we are stopped."""
    logs = cache_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / "".join(c if c.isalnum() else "-" for c in job.name)
    surroundings = {**os.environ, "PYTHONPATH": str(HERE)}  # for Flower's actors
    with log.with_suffix(".out").open("w") as out, log.with_suffix(".err").open("w") as err:
        process = subprocess.Popen(
            job.command, cwd=HERE, env=surroundings, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = process.wait(job.limit)
        except subprocess.TimeoutExpired:
            raise NoFigures(f"timed out after {job.limit} s") from None
        finally:
            if process.poll() is None:
                _end(process)
    lines = [line for line in log.with_suffix(".out").read_text().splitlines() if line.startswith("{")]
    if not lines:
        raise NoFigures(f"failed (exit code {code})")
    return json.loads(lines[-1])


def _end(process: subprocess.Popen) -> None:
    """The session, and descendants that have left it (Ray's)."""
    family = tree(process.pid)
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def measure(job: Job, patience: float) -> None:
    """One repeat; once more if others kept the machine busy meanwhile."""
    begin = time.monotonic()
    attempts: list[dict[str, Any]] = []
    for _ in range(2 if patience else 1):
        wait_until_quiet(patience)
        try:
            attempts.append(execute(job))
        except NoFigures as failure:
            job.failure = str(failure)
            return
        if attempts[-1].get("foreign_cores", 0) <= DISTURBED:
            break
    best = min(attempts, key=lambda figures: figures.get("min", 0))
    job.repeats.append(best | {"other_attempts": [figures for figures in attempts if figures is not best]})
    job.took = time.monotonic() - begin


def minutes_left(jobs: list[Job], after: int, repeats_left: int) -> float:
    """By what each job took before, or by their mean where it has not run yet."""
    known = [job.took for job in jobs if job.took is not None]
    mean = sum(known) / max(1, len(known))
    spans = [0.0 if job.failure else job.took or mean for job in jobs]
    return (sum(spans[after:]) + repeats_left * sum(spans)) / 60


def measure_all(jobs: list[Job], repeats: int, patience: float, say: Callable[[str], None]) -> Iterator[int]:
    """Yields after each repeat, so that it can be saved."""
    for repeat in range(repeats):
        for number, job in enumerate(jobs, 1):
            if job.failure is None:
                measure(job, patience)
            shown = job.failure or ", ".join(
                f"{key} {job.repeats[-1][key]}" for key in ("min", "fedadc", "plus", "pss_mb") if key in job.repeats[-1]
            )
            left = minutes_left(jobs, number, repeats - repeat - 1)
            say(f"[{repeat + 1}/{repeats} {number}/{len(jobs)}] {job.name}: {shown}  ({left:.0f} min left)")
        yield repeat + 1


def commit() -> str:
    """The commit that was measured, and whether the package had changed since."""
    git = ["git", "-C", str(HERE)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    changes = subprocess.run([*git, "status", "--porcelain", "--", "../fedadc"], capture_output=True, text=True).stdout
    return (head or "unknown") + (" with uncommitted changes" if changes.strip() else "")


def show(console: Console, sheets: list[Sheet], targets: list[Target]) -> None:
    for sheet in sheets:
        table = Table(*sheet.columns, title=sheet.title, title_justify="left")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
    table = Table("target", "at most", "measured", "", title="Targets", title_justify="left")
    colors = {"pass": "green", "FAIL": "red"}
    for target in targets:
        color = colors.get(target.verdict, "yellow")
        table.add_row(target.what, target.bound, target.measured, f"[{color}]{target.verdict}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="also pfl-research, Flower and fluke (see peers.py)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="else all")
    parser.add_argument("--repeats", type=int, default=3, help="of everything, interleaved (3)")
    parser.add_argument("--no-checks", action="store_true", help="only the workloads")
    parser.add_argument("--quick", action="store_true", help="only try the scripts: one repeat of small sizes")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a quiet machine each time")
    parser.add_argument("--out", type=Path, help="folder for the results (else results/; with --quick the cache)")
    given = parser.parse_args()
    if given.quick:
        os.environ["FEDADC_BENCH_QUICK"] = "1"
        given.repeats, given.patience = 1, 0
        CHECKS["many clients"][0][-1] = "20000"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended with us
    out = given.out or (cache_folder() / "quick" if given.quick else HERE / "results")
    out.mkdir(parents=True, exist_ok=True)

    console = Console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    subprocess.run([sys.executable, HERE / "workloads.py"], check=True)
    jobs = jobs_of(given.workloads, given.peers, not given.no_checks)
    facts, version = machine(), commit()
    path = out / result_name(facts, "-peers" if given.peers else "")
    for repeats in measure_all(jobs, given.repeats, given.patience, say):
        done = {job.name: job.failure or job.repeats for job in jobs}
        sheets, targets = [sheet_of(name, done) for name in given.workloads], targets_of(done)
        about = f"{machine_line(facts)}; fedadc at commit {version}; repeats, interleaved: {repeats}."
        if given.quick:
            about = f"A TRIAL WITH SMALL SIZES, NOT A MEASUREMENT. {about}"
        raw = {"machine": facts, "commit": version, "quick": given.quick, "repeats": repeats, "results": done}
        path.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(about, sheets, targets))
    show(console, sheets, targets)
    say(about)
    say(f"written to {out.name}: {path.name}.json and .md")


if __name__ == "__main__":
    main()
