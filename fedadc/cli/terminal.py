"""What a person sees in the terminal: progress with ETA, tables that fit, pictures in characters."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fedadc.analysis.compare import Summary, table_rows
from fedadc.analysis.experiment import Choice
from fedadc.analysis.label_counts import LabelCounts
from fedadc.cli.catalog import CatalogEntry
from fedadc.errors import FedadcError
from fedadc.personal.results import ResultRow
from fedadc.personal.results import table_rows as personal_rows
from fedadc.runs.runner import RunResult
from fedadc.training.state import Metrics


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read along has left; training goes on."""
        self.quiet = True


out = _Console()
err = _Console(stderr=True)
SHADES = " ░▒▓█"
SHOWN_CLIENTS = 40
SILENCE = 30  # seconds without a word, at most, where rounds are quicker


def say(text: str) -> None:
    out.print(Text(text), soft_wrap=True)


def note(text: str) -> None:
    err.print(Text(f"note: {text}"), soft_wrap=True)


class _Lines:
    """Progress where there is no terminal: a line now and then."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit, self.done, self.start = total, unit, 0, 0
        self.began = self.said = time.monotonic()

    def begin_at(self, done: int) -> None:
        """Of a run that goes on."""
        self.done = self.start = done

    def advance(self, what: str, record: dict[str, Any]) -> None:
        self.done += 1
        now = time.monotonic()
        tenth = self.done % max(1, self.total // 10) == 0
        if tenth or self.done == self.total or now - self.said > SILENCE:
            self.said = now
            left = (now - self.began) / (self.done - self.start) * (self.total - self.done)
            parts = (f"{what}: {self.done}/{self.total} {self.unit}", _state(record), f"{left:.0f} s left")
            err.print(Text(", ".join(filter(None, parts))), soft_wrap=True)


def _state(record: dict[str, Any]) -> str:
    for name, shown in (("personal_accuracy", "personal accuracy"), ("test_accuracy", "accuracy")):
        if isinstance(accuracy := record.get(name), float):
            return f"{shown} {100 * accuracy:5.1f} %"
    loss = record.get("train_loss")
    return f"loss {loss:.3f}" if isinstance(loss, float) else ""


class _Bar:
    """Progress in a terminal."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.last = progress, ""
        self.task = progress.add_task("starting", total=total, state="")

    def begin_at(self, done: int) -> None:
        self.progress.reset(self.task, completed=done)

    def advance(self, what: str, record: dict[str, Any]) -> None:
        state = _state(record)
        if "accuracy" in state or "accuracy" not in self.last:
            self.last = state
        self.progress.update(self.task, advance=1, description=what, state=self.last)


@contextmanager
def _bar(total: int, unit: str = "rounds") -> Iterator[_Lines | _Bar]:
    if not err.is_terminal:
        yield _Lines(total, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=False) as progress:
        yield _Bar(progress, total)


@contextmanager
def progress_of_run(rounds: int, name: str) -> Iterator[tuple[Callable[[dict[str, Any]], None], Callable[[str], None]]]:
    """A watcher of rounds, and a place for notes on the data."""
    with _bar(rounds) as bar:
        first = True

        def watch(record: dict[str, Any]) -> None:
            nonlocal first
            if first:
                bar.begin_at(record["round"] - 1)
            first = False
            bar.advance(name, record)

        yield watch, note


@contextmanager
def progress_of_runs(rounds: int, runs: int) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    seen: dict[str, int] = {}

    with _bar(rounds) as bar:

        def watch(name: str, record: dict[str, Any]) -> None:
            number = seen.setdefault(name, len(seen) + 1)
            bar.advance(f"{number:>2}/{runs} {name:<24}", record)

        yield watch


@contextmanager
def progress_of_trials(trials: int) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    with _bar(trials, "runs") as bar:
        yield bar.advance


@contextmanager
def progress_of_clients() -> Iterator[Callable[[str, int], None]]:
    """A bar for each run, one after another."""
    bars: dict[str, _Lines | _Bar] = {}
    with ExitStack() as shown:

        def watch(run: str, clients: int) -> None:
            if run not in bars:
                shown.close()
                bars[run] = shown.enter_context(_bar(clients, "clients"))
            bars[run].advance(run, {})

        yield watch


@contextmanager
def progress_of_download() -> Iterator[Callable[[str, int, int], None] | None]:
    if not err.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as progress:
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, size: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=size or None)
            progress.update(tasks[what], completed=done)

        yield update


def choices_table(choices: Sequence[Choice], choose_by: str) -> None:
    """What was chosen for each, and on which figures."""
    table = Table(title=f"chosen by {choose_by.replace('_', ' ')}", title_justify="left")
    for heading in ("run", "chosen", "of", "diverged"):
        table.add_column(heading, justify="left" if heading in ("run", "chosen") else "right")
    for choice in choices:
        scores = [score for _, score in choice.scores]
        table.add_row(Text(choice.label), Text(choice.described()), str(len(scores)), str(scores.count(None)))
    out.print(table)


def comparison(rows: Sequence[Summary], title: str) -> None:
    headings, cells = table_rows(rows)
    note = "mean ± std over seeds of the last 10 rounds' mean; bytes per client and round"
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    out.print(table)


def personal_table(rows: Sequence[ResultRow]) -> None:
    headings, cells = personal_rows(rows)
    caption = (
        "accuracy in % on each client's own test share: mean (± std) over clients, and over all their samples, global "
        "→ personal; gained, lost: % of clients"
    )
    without = max(row.figures().clients - row.figures().tested for row in rows)
    if without:
        caption += f"; clients without a test sample, left out: {without}"
    table = Table(caption=caption, caption_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    out.print(table)


def run_summary(result: RunResult) -> None:
    last = result.history[-1]
    known = [f"{k.replace('_', ' ')} {v:.4f}" for k, v in last.items() if isinstance(v, float) and "_" in k]
    say(f"round {last['round']}: {', '.join(known)}")
    if last["round"] < result.config.rounds:
        say(f"stopped early: accuracy {result.config.stop.accuracy} is reached")
    bad = Counter(client for record in result.history for client in record.get("skipped", []))
    if bad:
        worst = ", ".join(f"{client} ({times} ×)" for client, times in bad.most_common(5))
        note(f"{bad.total()} updates were not finite and left out (`skipped` in metrics.jsonl), of clients {worst}")
    say(f"run:   {result.out}")


def metrics_table(found: dict[str, Metrics], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table()
    table.add_column("samples")
    table.add_column("metric")
    table.add_column("value", justify="right", overflow="fold")
    for split, metrics in found.items():
        for name, value in metrics.items():
            shown = f"{value:.4f}" if isinstance(value, float) else " ".join(
                "–" if v is None else f"{v:.3f}" for v in value)  # fmt: skip
            table.add_row(Text(split), name, shown)
    out.print(table)


def catalog_table(what: str, entries: Sequence[CatalogEntry], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    table = Table(title=what, title_justify="left")
    for heading in ("name", "what it is", "settings"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for entry in entries:
        settings = "\n".join(f"{k}: {v}" for k, v in entry.settings.items())
        table.add_row(Text(entry.name), Text(entry.summary), Text(settings))
    out.print(table)
    if not entries[0].facts:
        return
    facts = Table(title="what travels (in models) and what else it takes", title_justify="left")
    for heading in ("name", *entries[0].facts):
        facts.add_column(heading, no_wrap=heading == "name")
    for entry in entries:
        facts.add_row(Text(entry.name), *map(Text, entry.facts.values()))
    out.print(facts)


def label_counts_table(found: LabelCounts, as_json: bool) -> None:
    """Clients × classes: the darker, the larger the share of the client's own data."""
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    say(found.describe())
    width = min(len(found.classes), max(10, out.width - 30))
    if any(len(c) > 1 for c in found.classes):
        say("classes: " + ", ".join(f"{i} {c}" for i, c in enumerate(found.classes[:width])))
    say(f"{'client':>14} {'samples':>8} " + "".join(str(i % 10) for i in range(width)))
    for client in range(min(SHOWN_CLIENTS, len(found.counts))):
        counts = found.counts[client]
        row = "".join(SHADES[min(4, int(-(-4 * c // max(1, counts.max()))))] for c in counts[:width])
        say(f"{found.clients[client][:14]:>14} {int(counts.sum()):>8} {row}")
    hidden = [f"{len(found.counts) - SHOWN_CLIENTS} more clients"] if len(found.counts) > SHOWN_CLIENTS else []
    hidden += [f"{len(found.classes) - width} more classes"] if len(found.classes) > width else []
    if hidden:
        say(f"({', '.join(hidden)}; --plot draws up to 200 clients)")
    for note in found.notes:
        say(f"note: {note}")


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run directories among these paths or below them: an experiment's folder has a folder for each of its rows."""
    found: list[Path] = []
    for path in paths:
        if (path / "metrics.jsonl").is_file() or not path.is_dir():
            found.append(path)
            continue
        below = sorted(f.parent for depth in ("*", "*/*") for f in path.glob(f"{depth}/metrics.jsonl"))
        below = [p for p in below if p.parent not in below]  # one that waits to be replaced lies in its successor
        if not below:
            raise FedadcError(f"{path} is not a run directory and holds none.")
        found += below
    return found
