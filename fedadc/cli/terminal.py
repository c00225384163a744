"""Terminal output: progress with the remaining time, tables that fit the window, charts of characters."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bars,
)
from rich.table import Table
from rich.text import Text

from fedadc.analysis.compare import TIME, table_rows
from fedadc.analysis.comparison import Comparison
from fedadc.analysis.label_counts import LabelCounts
from fedadc.config.catalog import CatalogEntry
from fedadc.personal.results import ResultRow
from fedadc.personal.results import table_rows as personal_rows
from fedadc.runs.layout import BEST_MODEL
from fedadc.runs.runner import RunResult
from fedadc.studies.experiment import Choice
from fedadc.studies.progress import Progress, RunProgress


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Continue without output when its reader has closed the pipe, so that training is not stopped."""
        self.quiet = True


out = _Console()
err = _Console(stderr=True)
SHADES = " ░▒▓█"
LABEL_WIDTH = 12  # of a label at least, if it is not shorter
SHOWN_CLIENTS = 40
MANY_ROWS = 20_000  # to predict, from which on progress is shown
MAX_SILENCE = 30  # seconds after which the next finished round is printed in any case


def say(text: str) -> None:
    """Print a line to stdout."""
    out.print(Text(text), soft_wrap=True)


def note(text: str) -> None:
    """Print a note to stderr."""
    err.print(Text(f"note: {text}"), soft_wrap=True)


class _Lines:
    """Progress without a terminal: a line every tenth of the way."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit, self.done, self.start = total, unit, 0, 0
        self.began = self.last_line = time.monotonic()
        self.last_kind = ""

    def begin_at(self, done: int) -> None:
        """Start the count at the round from which a run is resumed."""
        self.done = self.start = done

    def describe(self, what: str) -> None:
        """Say what happens, when it is something else than before."""
        kind = what.partition(":")[0]
        if kind != self.last_kind and not self.done:  # what happens in every round is not worth a line
            err.print(Text(what), soft_wrap=True)
        self.last_kind = kind

    def advance(self, what: str, record: dict[str, Any]) -> None:
        self.done += 1
        now = time.monotonic()
        tenth = self.done % max(1, self.total // 10) == 0
        if tenth or self.done == self.total or now - self.last_line > MAX_SILENCE:
            self.last_line = now
            left = (now - self.began) / (self.done - self.start) * (self.total - self.done)
            parts = (f"{what}: {self.done}/{self.total} {self.unit}", _latest_metric(record), f"{left:.0f} s left")
            err.print(Text(", ".join(filter(None, parts))), soft_wrap=True)


def _latest_metric(record: dict[str, Any]) -> str:
    """The score of a record, or else its training loss."""
    for name, shown in (("personal_accuracy", "personal accuracy"), ("test_accuracy", "accuracy")):
        if isinstance(accuracy := record.get(name), float):
            return f"{shown} {100 * accuracy:5.1f} %"
    for name, shown in (("personal_r2", "personal R²"), ("test_r2", "R²")):
        if isinstance(explained := record.get(name), float):
            return f"{shown} {explained:.3f}"
    loss = record.get("train_loss")
    return f"loss {loss:.3f}" if isinstance(loss, float) else ""


class _Bar:
    """Progress in a terminal: a bar."""

    def __init__(self, progress: Bars, total: int) -> None:
        self.progress, self.last = progress, ""
        self.task = progress.add_task("starting", total=total, metric="")

    def describe(self, what: str) -> None:
        self.progress.update(self.task, description=escape(what))

    def begin_at(self, done: int) -> None:
        self.progress.reset(self.task, completed=done)

    def advance(self, what: str, record: dict[str, Any]) -> None:
        metric = _latest_metric(record)
        scored = self.last and not self.last.startswith("loss")
        if not (scored and metric.startswith("loss")):  # keep showing the last score between evaluations
            self.last = metric
        self.progress.update(self.task, advance=1, description=what, metric=self.last)


@contextmanager
def _bar(total: int, unit: str = "rounds") -> Iterator[_Lines | _Bar]:
    if not err.is_terminal:
        yield _Lines(total, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metric]}"),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=err, transient=False) as progress:
        yield _Bar(progress, total)


class _RunCallbacks:
    """What a run calls: `watch` with the record of every round, `show` with what it waits for."""

    def __init__(self, bar: _Lines | _Bar, name: str) -> None:
        self.bar, self.name, self.first = bar, name, True

    def watch(self, record: dict[str, Any]) -> None:
        if self.first:
            self.bar.begin_at(record["round"] - 1)
        self.first = False
        self.bar.advance(self.name, record)

    def show(self, sentence: str) -> None:
        self.bar.describe(sentence)


@contextmanager
def progress_of_run(rounds: int, name: str) -> Iterator[tuple[Callable[[dict[str, Any]], None], Callable[[str], None]]]:
    """Callbacks of a run: one for the record of every round, one for notes on the data."""
    with _bar(rounds) as bar:
        yield _RunCallbacks(bar, name).watch, note


@contextmanager
def progress_of_federation(
    rounds: int, name: str
) -> Iterator[tuple[Callable[[dict[str, Any]], None], Callable[[str], None]]]:
    """Callbacks of a federation: one for the record of every round, one for what its server waits for."""
    with _bar(rounds) as bar:
        callbacks = _RunCallbacks(bar, name)
        yield callbacks.watch, callbacks.show


@contextmanager
def progress_of_runs(rounds: int, runs: int) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """A callback for the record of every round of several runs, one after another."""
    numbers: dict[str, int] = {}

    with _bar(rounds) as bar:

        def watch(name: str, record: dict[str, Any]) -> None:
            number = numbers.setdefault(name, len(numbers) + 1)
            bar.advance(f"{number:>2}/{runs} {name:<24}", record)

        yield watch


@contextmanager
def progress_of_queue() -> Iterator[Callable[[Progress], None]]:
    """A callback for the progress of many runs, several of which are trained at once."""
    if not err.is_terminal:
        yield _QueueLines()
        return
    columns = (
        BarColumn(bar_width=20),
        TextColumn("{task.fields[ended]}/{task.total} {task.fields[unit]}"),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}"),
    )
    with Bars(*columns, console=err) as bars:
        task = bars.add_task("starting", total=0, ended=0, left="", unit="runs")

        def watch(progress: Progress) -> None:
            shown = " · ".join(_described(run) for run in progress.running)
            room = max(10, err.width - 46)  # beside the bar, the count and the time
            shown = shown if len(shown) <= room else f"{shown[: room - 1]}…"
            bars.update(
                task, total=progress.runs, completed=progress.share, ended=progress.ended,
                unit=progress.unit, left=_time_left(progress), description=escape(shown),
            )  # fmt: skip

        yield watch


class _QueueLines:
    """The progress of many runs without a terminal: a line every tenth of the way."""

    def __init__(self) -> None:
        self.shown, self.last_line = 0, time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now, steps = time.monotonic(), max(1, progress.runs // 10)
        self.shown = min(self.shown, progress.ended)  # another queue may follow
        due = progress.ended > self.shown and (progress.ended % steps == 0 or progress.ended == progress.runs)
        if not due and (now - self.last_line < MAX_SILENCE or not progress.running):
            return
        self.shown, self.last_line = progress.ended, now
        label, record = progress.last or ("", {})
        last = ", ".join(filter(None, (label, _latest_metric(record)))) if due else ""
        running = "; ".join(_described(run) for run in progress.running)
        parts = (f"{progress.ended}/{progress.runs} {progress.unit}", _time_left(progress), last or running)
        err.print(Text(", ".join(filter(None, parts))), soft_wrap=True)


def _described(run: RunProgress) -> str:
    return f"{run.label} {run.round}/{run.rounds}"


def _time_left(progress: Progress) -> str:
    left = progress.seconds_left
    return "" if left is None else f"{duration(left)} left"


def duration(seconds: float) -> str:
    """A time in the largest unit in which it is at least 1.5."""
    unit, size = next((u for u in reversed(TIME) if seconds >= 1.5 * u[1]), TIME[0])
    value = seconds / size
    return f"{value:.0f} {unit}" if value >= 10 or unit == "s" else f"{value:.1f} {unit}"


@contextmanager
def progress_of_calibration() -> Iterator[Callable[[int, int], None]]:
    """A callback for the number of calibrations done, and of all."""
    bars: list[_Lines | _Bar] = []
    with ExitStack() as shown:

        def watch(done: int, total: int) -> None:
            if not bars:
                bars.append(shown.enter_context(_bar(total, "calibrations")))
            if done:
                bars[0].advance("measuring", {})

        yield watch


@contextmanager
def progress_of_clients() -> Iterator[Callable[[str, int], None]]:
    """A callback for every personalized client; each run has its own bar, one after another."""
    bars: dict[str, _Lines | _Bar] = {}
    with ExitStack() as current:

        def watch(run: str, clients: int) -> None:
            if run not in bars:
                current.close()
                bars[run] = current.enter_context(_bar(clients, "clients"))
            bars[run].advance(run, {})

        yield watch


@contextmanager
def progress_of_rows() -> Iterator[Callable[[int, int], None]]:
    """A callback for the number of rows that are predicted and of all rows; a few rows are not worth a bar."""
    bars: list[_Lines | _Bar] = []
    with ExitStack() as current:

        def watch(done: int, rows: int) -> None:
            if rows < MANY_ROWS:
                return
            if not bars:  # after the first batch
                bars.append(current.enter_context(_bar(-(-rows // done), "batches")))
            bars[0].advance("predicting", {})

        yield watch


@contextmanager
def progress_of_download() -> Iterator[Callable[[str, int, int], None] | None]:
    """A callback for the file, the bytes so far and the bytes in total; None without a terminal."""
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
    with Bars(*columns, console=err) as progress:
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, size: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=size or None)
            progress.update(tasks[what], completed=done)

        yield update


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """A table whose cells are wrapped where the window is narrow. Columns of numbers are aligned to the right."""
    table = Table(title=title or None, title_justify="left", caption=Text(caption), caption_justify="left")
    for index, heading in enumerate(headings):
        numbers = all(row[index][:1] in "0123456789+-–−" for row in rows)
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    out.print(table)


def choices_table(choices: Sequence[Choice], choose_by: str) -> None:
    """The setting that was chosen for each run of an experiment."""
    title = f"best setting of each run by {choose_by.replace('_', ' ')}"
    table = Table(title=title, title_justify="left")
    for heading in ("run", "best setting", "settings", "diverged"):
        table.add_column(heading, justify="left" if heading in ("run", "best setting") else "right")
    sizes = [len(choice.scores) for choice in choices]
    for choice in choices:
        scores = [score for _, score in choice.scores]
        tried = f"{len(scores)}{' *' if len(scores) < max(sizes) else ''}"
        table.add_row(Text(choice.label), Text(choice.described()), tried, str(scores.count(None)))
    if min(sizes) < max(sizes):
        table.caption = f"budgets differ: * fewer settings than other runs, which tried {max(sizes)}"
        table.caption_justify = "left"
    out.print(table)
    for choice in choices:
        for sentence in choice.edges:
            note(f"{choice.label}: {sentence}")


def comparison(result: Comparison, title: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(row) for row in result.rows], indent=2))
        return
    headings, cells = table_rows(result.rows)
    caption = "mean of the last 10 rounds, then mean ± std over seeds; up, down: bytes per client and round"
    _table_of_numbers([heading.replace(" to ", "\nto ") for heading in headings], cells, title, caption)


def _table_of_numbers(headings: Sequence[str], cells: Sequence[Sequence[str]], title: str, caption: str) -> None:
    """A table of labels and numbers. Labels are folded where they are long, numbers are never cut.

    Where it would be too wide, what follows ± or → is on a second line.
    """
    columns = [*zip(headings, *cells, strict=True)]
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    if sum(widths[1:]) + min(widths[0], LABEL_WIDTH) + 3 * len(columns) + 1 > out.width:
        cells = [[cell.replace(" ± ", "\n± ").replace(" → ", "\n→ ") for cell in row] for row in cells]
        columns = [*zip(headings, *cells, strict=True)]
        widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    table = Table(title=title or None, title_justify="left", caption=caption, caption_justify="left")
    for index, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        least = width if index else min(width, LABEL_WIDTH)
        table.add_column(
            heading, justify="right" if index else "left", overflow="fold", no_wrap=index > 0, min_width=least
        )
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    out.print(table)


def personal_table(rows: Sequence[ResultRow]) -> None:
    headings, cells = personal_rows(rows)
    figure = rows[0].metric + (" (%)" if rows[0].is_share else "")
    caption = (
        f"{figure} on each client's own test share; global, personal: mean (± std) over clients; all samples: over "
        "the test samples of all clients, global → personal; gained, lost: % of clients"
    )
    untested = max(row.figures().clients - row.figures().tested for row in rows)
    if untested:
        caption += f"; clients without test samples, not counted: {untested}"
    _table_of_numbers(headings, cells, "", caption)


def run_summary(result: RunResult) -> None:
    last = result.history[-1]
    metrics = [f"{k.replace('_', ' ')} {v:.4f}" for k, v in last.items() if isinstance(v, float) and "_" in k]
    say(f"round {last['round']}: {', '.join(metrics)}")
    if last["round"] < result.config.rounds:
        say(f"stopped early: {result.stopped}")
    best = result.best
    if best is not None and best.round:
        where = f" ({BEST_MODEL})" if best.kept else ""
        say(f"best {str(best.metric).replace('_', ' ')} {best.value:.4f} at round {best.round}{where}")
    skipped = Counter(client for record in result.history for client in record.get("skipped", []))
    if skipped:
        most = ", ".join(f"{client} ({times} ×)" for client, times in skipped.most_common(5))
        note(f"skipped {skipped.total()} updates that were not finite (`skipped` in metrics.jsonl); clients: {most}")
    say(f"run:   {result.out}")


def catalog_table(what: str, entries: Sequence[CatalogEntry], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    table = Table(title=what, title_justify="left")
    for heading in ("name", "description", "settings"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for entry in entries:
        settings = "\n".join(f"{k}: {v}" for k, v in entry.settings.items())
        table.add_row(Text(entry.name), Text(entry.summary), Text(settings))
    out.print(table)
    if not entries[0].facts:
        return
    facts = Table(title="communication (× model size), client state, extra computation", title_justify="left")
    for heading in ("name", *entries[0].facts):
        facts.add_column(heading, no_wrap=heading == "name")
    for entry in entries:
        facts.add_row(Text(entry.name), *map(Text, entry.facts.values()))
    out.print(facts)


def label_counts_table(data: LabelCounts, as_json: bool) -> None:
    """A character per client and class: the darker, the more samples relative to the client's largest class."""
    if as_json:
        print(json.dumps(data.as_dict()))
        return
    say(data.describe())
    width = min(len(data.classes), max(10, out.width - 30))
    if any(len(c) > 1 for c in data.classes):
        say("classes: " + ", ".join(f"{i} {c}" for i, c in enumerate(data.classes[:width])))
    say(f"{'client':>14} {'samples':>8} " + "".join(str(i % 10) for i in range(width)))
    for client in range(min(SHOWN_CLIENTS, len(data.counts))):
        counts = data.counts[client]
        row = "".join(SHADES[min(4, int(-(-4 * c // max(1, counts.max()))))] for c in counts[:width])
        say(f"{data.clients[client][:14]:>14} {int(counts.sum()):>8} {row}")
    hidden = [f"{len(data.counts) - SHOWN_CLIENTS} more clients"] if len(data.counts) > SHOWN_CLIENTS else []
    hidden += [f"{len(data.classes) - width} more classes"] if len(data.classes) > width else []
    if hidden:
        say(f"({', '.join(hidden)}; --plot draws up to 200 clients)")
    for note in data.notes:
        say(f"note: {note}")
