"""`make torture`: every method, killed again and again in real processes, must end with the bits of a quiet run.

Half an hour on two cores, two minutes with --quick. A process is killed at random moments, and ends itself at random
points of a checkpoint's writing; between the kills it is asked to end politely, loses workers, and finds its newest
checkpoint damaged. After every kill the folder is checked. Then: a full disk, and memory over many rounds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from doomed import Life, run_words
from family import children, descendants
from fedadc.methods import METHODS, PAIRS
from fedadc.system.processes import cores
from torment import BASE, VARIED, Row, Torment, config_of, fill_the_disk, lives_of, recorded

NAMES = list(dict.fromkeys([*METHODS, *PAIRS, *VARIED]))
MANY_ROUNDS = 200  # enough for the memory to show where it goes
FLAT = 20  # kB per round that memory may grow: a cohort's states are some 400


@dataclass
class Memory:
    """Resident memory over the rounds of a run, in kB."""

    name: str
    rounds: list[int] = field(default_factory=list)
    main: list[float] = field(default_factory=list)
    worker: list[float] = field(default_factory=list)  # the mean

    def slopes(self) -> list[float]:
        """kB per round of main process and worker, by least squares over all but the first quarter."""
        rounds, kb = np.array(self.rounds), np.array([self.main, self.worker]).T
        counted = (rounds > rounds[-1] / 4) & np.isfinite(kb).all(axis=1)  # workers may be gone before the last
        return [float(slope) for slope in np.polyfit(rounds[counted], kb[counted], 1)[0]]


def resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
    except (OSError, IndexError):  # gone in the meantime
        return float("nan")


def memory_of(name: str, folder: Path, tick: Callable[[int], None]) -> Memory:
    """1,000 clients, whose states soon outgrow the memory that they may take."""
    config = {
        **BASE, "method": name, "rounds": MANY_ROUNDS, "cohort": {"size": 20}, "model": {"name": "mlp", "hidden": [64]},
        "data": {"name": "digits", "clients": 1000}, "storage": {"memory_gb": 0.001}, "checkpoint": {"every": 5},
    }  # fmt: skip
    folder.mkdir(parents=True)
    found, out = Memory(name), folder / "run"
    with Life(run_words(config, out, workers=2), folder / "log", started=True) as life:
        done = 0
        while life.until(lambda: recorded(out) > done):  # noqa: B023
            tick(recorded(out) - done)
            done = recorded(out)
            workers = descendants(life.pid) - children(life.pid)
            found.rounds.append(done)
            found.main.append(resident(life.pid))
            found.worker.append(float(np.mean([resident(pid) for pid in workers] or [np.nan])))
    assert life.code() == 0, life.printed()
    return found


def kills_table(rows: list[Row]) -> Table:
    table = Table(title="Killed, and gone on", box=SIMPLE, padding=0, collapse_padding=True)
    heads = (
        "workers",
        "kills",
        "in a\nwrite",
        "rounds\nlost",
        "at\nmost",
        "signals",
        "workers\nkilled",
        "files\ndamaged",
    )
    for head in ("method", *heads, "bits\ndiffering"):
        table.add_column(head, justify="left" if head == "method" else "right")
    for r in sorted(rows, key=lambda r: (NAMES.index(r.name), r.workers)):
        lost = f"{np.mean(r.lost or [0]):.1f}", max(r.lost or [0])
        cells = (r.workers, r.kills, r.in_writes, *lost, r.signals, r.workers_lost, r.damages)
        table.add_row(r.name, *map(str, cells), "see below" if r.wrong else "0")
    return table


def memory_table(found: list[Memory]) -> Table:
    table = Table(title="Resident memory: 1,000 clients, cohorts of 20", box=SIMPLE, padding=(0, 1))
    for head in ("method", "rounds", "main: MB", "kB per round", "a worker: MB", "kB per round"):
        table.add_column(head, justify="left" if head == "method" else "right")
    for m in found:
        main, worker = m.slopes()
        cells = (
            m.rounds[-1],
            f"{m.main[-1] / 1024:.0f}",
            f"{main:+.1f}",
            f"{m.worker[-1] / 1024:.0f}",
            f"{worker:+.1f}",
        )
        table.add_row(m.name, *map(str, cells))
    return table


def torment_all(options: argparse.Namespace, folder: Path, progress: Progress) -> list[Row]:
    cells = list(itertools.product(options.methods, options.workers))
    random.Random(options.seed).shuffle(cells)  # so that the estimate of the time left is right
    task = progress.add_task("kills", total=len(cells) * lives_of(options.kills))

    def endured(cell: tuple[str, int]) -> Row:
        (name, workers), began = cell, time.monotonic()
        place = folder / f"{NAMES.index(name)}-{workers}"
        try:
            torment = Torment(name, config_of(name, 5 * options.kills), place, workers, str(options.seed))
            row = torment.endure(options.kills, lambda: progress.advance(task))
        except AssertionError as error:
            row = Row(name, workers, wrong=str(error))
        if not row.wrong:
            shutil.rmtree(place)
        how = row.wrong.split("\n")[0] or "same bits"
        progress.console.print(f"{name}, {workers} workers: {row.kills} kills, {how}, {time.monotonic() - began:.0f} s")
        return row

    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(endured, cells))


def remember_all(names: list[str], folder: Path, progress: Progress) -> list[Memory]:
    task = progress.add_task("memory", total=MANY_ROUNDS * len(names))
    return [memory_of(name, folder / f"memory-{name}", lambda new: progress.advance(task, new)) for name in names]


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="per method and number of workers")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=NAMES, help="of " + ", ".join(NAMES))
    parser.add_argument("--workers", type=lambda text: [int(n) for n in text.split(",")], default=[0, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=cores(), help="methods at a time")
    parser.add_argument("--quick", action="store_true", help="few kills, of few methods")
    options = parser.parse_args(words)
    if strange := set(options.methods) - set(NAMES):
        parser.error(f"there is no method {', '.join(sorted(strange))}")
    options.memory = ["fedadc", "scaffold", "feddyn"]
    if options.quick:
        options.kills, options.memory = 6, ["scaffold"]
        options.methods = ["fedadc", "fedadc_double", "scaffold", "feddyn", "moon", "local_only"]
    return options


def main() -> int:
    options, console, began = options_of(), Console(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="fedadc-torture-"))
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left:", TimeRemainingColumn()
    with Progress("{task.description}", *columns, console=console, speed_estimate_period=600) as progress:
        rows = torment_all(options, folder, progress)
        memory = remember_all(options.memory, folder, progress)
    console.print(kills_table(rows), memory_table(memory))
    wrong = [f"{row.name}, {row.workers} workers: {row.wrong}" for row in rows if row.wrong]
    wrong += [f"{m.name}: memory grows by {max(m.slopes()):.0f} kB per round" for m in memory if max(m.slopes()) > FLAT]
    try:
        console.print(f"A full disk: {fill_the_disk(folder / 'full')}.")
    except AssertionError as error:
        wrong.append(f"a full disk: {error}")
    for sentence in wrong:
        console.print(sentence, style="red", markup=False)
    kills, minutes = sum(row.kills for row in rows), (time.monotonic() - began) / 60
    console.print(f"{kills} kills in {minutes:.0f} minutes; {len(wrong)} things went wrong.")
    if wrong:
        console.print(f"What is left of them is in {folder}.")
    else:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
