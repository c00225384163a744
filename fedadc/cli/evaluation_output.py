"""What `fedadc evaluate` prints: metrics, figures by client, class or target, and the confusion matrix."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedadc.cli.terminal import SHOWN_CLIENTS, out, print_table, say
from fedadc.data.dataset import Array
from fedadc.evaluation.figures import most_confused
from fedadc.evaluation.frames import FigureTable
from fedadc.evaluation.report import SplitReport
from fedadc.evaluation.stopping import higher_is_better
from fedadc.fields.summary import short_number
from fedadc.runs.evaluation import EvaluationResult

FEW_CLIENTS = 30
EXTREMES = 10  # clients shown at either end, where not all are shown
SHOWN_CLASSES = 60
SHOWN_PAIRS = 15
PERCENT_WIDTH = 3  # of a cell: only 100 fills it, and then all others of the row are blank
MOST_IN_MATRIX = 30  # classes
LONGEST_CLASS = 16  # of a class at its row of the matrix
SHORTEST_NAME = 6
SHORT_HEADINGS = {
    "average_precision": "avg.\nprec.",
    "calibration_error": "calib.\nerror",
    "sensitivity": "sensi-\ntivity",
    "specificity": "speci-\nficity",
    "precision": "preci-\nsion",
}


def evaluation_tables(result: EvaluationResult, as_json: bool) -> None:
    """Print the metrics of every split, and what `by` asks for."""
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
        return
    headings = ["data", "metric", "value", *(["95 % interval"] if result.intervals else [])]
    rows = [
        [row["data"], row["metric"], _cell(row["value"])] + ([_interval(row)] if result.intervals else [])
        for row in result.rows()
        if row["data"] not in result.repeated
    ]
    captions = ["the best model is the last one"] if result.repeated else []
    if result.intervals and result.by == "client" and len(result.per_client) < FEW_CLIENTS:
        captions.append(f"intervals of fewer than {FEW_CLIENTS} clients are too narrow")
    print_table("", headings, rows, "; ".join(captions))
    if result.by == "client":
        _clients(result.report())
    elif result.by == "class":
        _classes(result.per_class, result.split)
        confusion_matrix(result.confusion, result.report().classes)
    elif result.by == "target":
        _figures(result.per_target, f"{result.split} by target", [*result.per_target], "in units of each target")


def _cell(value: Any, digits: int = 4) -> str:
    """A value in a table; – where there is none."""
    if isinstance(value, list):
        return " ".join("–" if v is None else short_number(v, 3) for v in value)
    return "–" if value is None else short_number(value, digits) if isinstance(value, float) else str(value)


def _interval(row: Mapping[str, Any]) -> str:
    return "–" if row["low"] is None else f"{short_number(row['low'])} to {short_number(row['high'])}"


def _figures(table: FigureTable, title: str, shown: Sequence[str], caption: str) -> None:
    """A row for each of these clients, classes or targets; names are folded where they are long, numbers are not."""
    rows = {row[table.kind]: row for row in table.rows()}
    headings = list(dict.fromkeys(name for row in rows.values() for name in row))
    drawn = Table(
        title=title,
        title_justify="left",
        caption=Text(caption),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, heading in enumerate(headings):
        text = SHORT_HEADINGS.get(heading, heading.replace("_", " "))
        drawn.add_column(text, justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    for name in shown:
        drawn.add_row(*(Text(_cell(rows[name].get(heading), digits=3)) for heading in headings))
    out.print(drawn)


def _clients(report: SplitReport) -> None:
    """All clients, or those at either end, and how they spread."""
    table, names = report.per_client, [*report.per_client]
    judged = next(iter(report.fairness), None)
    title, caption = f"{report.split} by client", ""
    if len(names) > SHOWN_CLIENTS and judged is not None:
        sign = -1 if higher_is_better(judged) else 1
        ordered = sorted(names, key=lambda name: -sign * table[name][judged])
        names = [*ordered[:EXTREMES], *ordered[-EXTREMES:]]
        caption = f"the {EXTREMES} worst and the {EXTREMES} best of {len(ordered):,} clients by {judged}"
        caption += "; --out FILE.csv or --json has all"
    _figures(table, title, names, caption)
    rows = [[name, *(short_number(value) for value in found.values())] for name, found in report.fairness.items()]
    heads = ["over clients", "worst", "10th percentile", "mean", "std"]
    print_table("", heads, rows, "each client counts once, whatever its number of rows")


def _classes(table: FigureTable, split: str) -> None:
    names = [*table]
    caption = "recall is sensitivity; AUROC and average precision: the class against all others"
    if len(names) > SHOWN_CLASSES:
        names = sorted(names, key=lambda name: table[name]["f1"] if table[name]["f1"] is not None else 2.0)
        names = names[:SHOWN_CLASSES]
        caption += f"; the {SHOWN_CLASSES} of {len(table):,} classes with the lowest F1; --out FILE.csv has all"
    _figures(table, f"{split} by class", names, caption)


def confusion_matrix(confusion: Array, classes: Sequence[str]) -> None:
    """The matrix as counts, or as shares of a row where those are too wide; else the most confused pairs."""
    many, name_width = len(classes), min(LONGEST_CLASS, max(map(len, classes)))
    counts = max(4, len(str(int(confusion.max()))) + 1)
    as_counts = name_width + 4 + counts * many <= out.width
    width, unit = (counts, "rows") if as_counts else (PERCENT_WIDTH, "% of the label's rows")
    name_width = min(name_width, out.width - 4 - width * many)
    if many > MOST_IN_MATRIX or name_width < min(SHORTEST_NAME, max(map(len, classes))):
        _confused_pairs(confusion, classes)
        return
    say(f"confusion matrix: labels down, predictions across; {unit}")
    say(" " * (name_width + 4) + "".join(f"{number:>{width}}" for number in range(many)))
    for number, name in enumerate(classes):
        line = Text(f"{number:>2} {_short(name, name_width):<{name_width}} ")
        total = max(1, int(confusion[number].sum()))
        for column, count in enumerate(confusion[number].tolist()):
            share = str(count) if as_counts else _percent(count, total)
            shown = share if count else "·"
            style = "dim" if not count else "bold green" if column == number else "red" if 10 * count >= total else ""
            line.append(f"{shown:>{width}}", style)
        out.print(line, soft_wrap=True)
    if not as_counts:
        say("<: less than half a percent; a wider terminal has room for counts, and --confusion FILE.png draws them")


def _confused_pairs(confusion: Array, classes: Sequence[str]) -> None:
    """The pairs of classes that are most often taken for each other, where the matrix does not fit."""
    totals = confusion.sum(axis=1)
    rows = [
        [classes[i], classes[j], str(count), f"{100 * count / int(totals[i]):.1f} %"]
        for i, j, count in most_confused(confusion, SHOWN_PAIRS)
    ]
    caption = f"{len(classes)} classes are too many for a matrix here; --confusion FILE.png draws it"
    print_table("most confused", ["label", "predicted as", "rows", "of the label"], rows, caption)


def _percent(count: int, total: int) -> str:
    """A share in percent; 100 is all, and < is less than half a percent."""
    share = round(100 * count / total)
    return "<" if share == 0 else str(min(share, 99) if count < total else 100)


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"
