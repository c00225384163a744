"""Clock, process tree and memory. Linux only: everything comes from /proc.

Memory is PSS, the proportional set size, summed over a process and all its descendants: what several processes share
is counted once. Next to the seconds stands how many cores *other* processes used meanwhile, so that a reader
sees which figures a busy machine may have spoilt. This file runs in the peers' environments too.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from workloads import workload

QUIET = 0.15  # busy cores, at most
_TICK = os.sysconf("SC_CLK_TCK")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
Mark = tuple[float, float, float]


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def tree(root: int | None = None) -> list[int]:
    """The ids of a process (this one unless told) and of all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
            except _GONE:
                continue
    todo, found = [root or os.getpid()], []
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def pss_mb(root: int | None = None) -> float:
    """Memory of a process tree in MB (2^20 bytes)."""
    total = 0
    for pid in tree(root):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except _GONE:
            continue
        total += int(text.partition("\nPss:")[2].split()[0])
    return total / 1024


def mark(pids: list[int]) -> Mark:
    """Now: seconds, core-seconds that the whole machine has been busy (with steal), and those of some processes."""
    fields = [int(v) for v in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    own = 0
    for pid in pids:
        try:
            stat = _stat(pid)
        except _GONE:
            continue
        own += int(stat[11]) + int(stat[12])
    return time.perf_counter(), (sum(fields) - fields[3] - fields[4]) / _TICK, own / _TICK


def age(pid: int | None = None) -> float:
    """Seconds since a process was started."""
    start = int(_stat(pid or os.getpid())[19]) / _TICK
    return float(Path("/proc/uptime").read_text().split()[0]) - start


def busy_cores(seconds: float = 1.0) -> float:
    """How many cores are busy now, with steal."""
    before = mark([])
    time.sleep(seconds)
    after = mark([])
    return (after[1] - before[1]) / (after[0] - before[0])


def wait_until_quiet(patience: float) -> float:
    """How many cores are busy in the end; a machine that stays busy is measured all the same."""
    end = time.monotonic() + patience
    while (busy := busy_cores()) > QUIET and time.monotonic() < end:
        pass
    return busy


class Clock:
    """`start()` before the first round, `tick()` after each; `report()` prints the figures as a line of JSON."""

    def __init__(self, name: str, root: int | None = None) -> None:
        self.workload, self.root = workload(name), root
        self.marks: list[Mark] = []
        self.pids: list[int] = []
        self.first_end = 0.0

    def start(self) -> None:
        self._mark()

    def tick(self) -> None:
        self._mark()
        if len(self.marks) == 2:
            self.first_end = age(self.root)

    def _mark(self) -> None:
        if len(self.marks) <= self.workload.warm:  # processes may still be starting
            self.pids = tree(self.root)
        self.marks.append(mark(self.pids))

    def report(self, *packages: str) -> None:
        timed = self.marks[self.workload.warm :]
        seconds = [round(after[0] - before[0], 4) for before, after in pairwise(timed)]
        wall, busy, own = (end - begin for begin, end in zip(timed[0], timed[-1], strict=True))
        say(
            min=min(seconds),
            seconds=seconds,
            foreign_cores=round(max(0.0, (busy - own) / wall), 2),
            pss_mb=round(pss_mb(self.root)),
            processes=len(tree(self.root)),
            startup_s=round(self.first_end - min(seconds), 2),  # what starts lazily in the first round counts too
            versions={name: metadata.version(name) for name in ("torch", "numpy", *packages)},
        )


def say(**figures: Any) -> None:
    """One line of JSON, which run.py reads."""
    print(json.dumps(figures), flush=True)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text()
    named = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = set(info.partition("\nflags")[2].partition("\n")[0].split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": named[1].strip() if named else platform.machine(),
        "vectors": "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def machine_line(facts: dict[str, Any]) -> str:
    return (
        f"{facts['cpu']} ({facts['vectors']}), {facts['cores']} cores, {facts['memory_gb']} GB, {facts['system']}, "
        f"Python {facts['python']}, torch {facts['torch']}"
    )


def result_name(facts: dict[str, Any], suffix: str = "") -> str:
    """<date>-<cpu>, as files under results/ are called."""
    cpu = re.sub(r"\((r|tm)\)|\bcpu\b|@.*", " ", facts["cpu"].lower())
    slug = re.sub(r"[^a-z0-9]+", "-", cpu).strip("-")
    return f"{time.strftime('%Y-%m-%d')}-{slug}-{facts['cores']}-cores{suffix}"
