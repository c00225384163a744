"""Decide from the merged summary of a table how its columns are encoded, and which classes there are."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from fedadc.data.encoding import TableEncoding
from fedadc.data.features import MISSING_CATEGORY, Column, Constants
from fedadc.data.labels import require_classes
from fedadc.data.rules import TableRules
from fedadc.data.spelling import as_yaml, no_number
from fedadc.data.summaries import ColumnSummary, TableSummary
from fedadc.errors import DataError, require
from fedadc.tasks import Target

INTEGER = re.compile(r"[+-]?\d{1,18}")  # every number of 18 digits fits into int64
KEPT_DIGITS = 6  # of the constants of standard scaling, so that they are stable and can be pasted
# where a column has one of these texts, and which of them: ("table.csv, row 7", "abc")
Locate = Callable[[str, Collection[str]], tuple[str, str]]


def refuse_stray_texts(summary: TableSummary, rules: TableRules, locate: Locate) -> None:
    """Refuse a text in a column of numbers, and constants for a column that has texts."""
    for name, column in summary.columns.items():
        given = name in rules.constants
        if column.words and name not in rules.categories and (given or column.texts <= column.numbers):
            why = "scale needs numbers" if given else "most values of the column are numbers"
            where, text = locate(name, column.words)
            raise DataError(f"{where}, column {name}: {reprlib.repr(text)} is {no_number(text)}, but {why}.")


def notes_about(encoding: TableEncoding, summary: TableSummary) -> tuple[str, ...]:
    """What becomes of every column, the constants to paste, and a warning about large numbers."""
    notes, wide = [], []
    fitted: dict[str, list[float]] = {}
    for column in encoding.columns:
        found = summary.columns[column.name]
        notes.append(column.describe(found))
        if column.categories is None and column.scaled and found.sums is not None:
            fitted[column.name] = [column.center, column.spread]
        plain = column.categories is None and not column.scaled and not column.by_client
        if plain and max(-(found.low or 0), found.high or 0) > 10:
            wide.append(as_yaml(column.name))
    if fitted:
        listed = ", ".join(f"{as_yaml(name)}: {constants}" for name, constants in fitted.items())
        notes.append(
            f"numbers are scaled by the mean and standard deviation of the training rows, as by scale: {{{listed}}}"
        )
    if wide:
        has, are = ("has", "is") if len(wide) == 1 else ("have", "are")
        notes.append(
            f"{', '.join(wide)} {has} values beyond ±10 and {are} not scaled: training may be slow or "
            f"diverge; scale: standard scales all columns of numbers"
        )
    return tuple(notes)


def fit_columns(summary: TableSummary, rules: TableRules) -> tuple[Column, ...]:
    """The encoding of every column of a table with this summary, in which no column is mixed."""
    return tuple(_column(name, column, rules) for name, column in summary.columns.items())


def _column(name: str, summary: ColumnSummary, rules: TableRules) -> Column:
    has_missing = summary.missing > 0
    if summary.words:
        return Column(name, summary.words + ((MISSING_CATEGORY,) if has_missing else ()), has_missing)
    if rules.scale == "per-client":
        return Column(name, None, has_missing, by_client=True)
    constants = rules.constants.get(name)
    if rules.scale == "standard":
        told = f"scale: standard needs the sums of column {name}, which no client tells."
        require(summary.sums is not None, told)
        constants = standard_constants(summary)
    center, spread = constants or (0.0, 1.0)
    return Column(name, None, has_missing, float(center), float(spread), scaled=constants is not None)


def standard_constants(summary: ColumnSummary) -> Constants:
    """The mean and the standard deviation, rounded; of a constant column, its value and 1."""
    n, total, squares = summary.sums or (0, 0.0, 0.0)
    if n == 0:
        return 0.0, 1.0
    mean, spread = total / n, math.sqrt(squares / n)
    if spread <= abs(mean) * 1e-12:  # no more than what rounding leaves
        return float(f"{mean:.12g}"), 1.0
    spread = float(f"{spread:.{KEPT_DIGITS}g}")
    return round(mean, KEPT_DIGITS - 1 - math.floor(math.log10(spread))), spread


def fit_targets(summary: TableSummary, rules: TableRules, locate: Locate) -> tuple[Target, ...]:
    """The numbers to predict, scaled by the given constants or by mean and standard deviation."""
    found = []
    for name in rules.targets:
        column = summary.columns[name]
        if column.words:
            where, text = locate(name, column.words)
            raise DataError(f"{where}, column {name}: the label {reprlib.repr(text)} is {no_number(text)}.")
        mean, deviation = standard_constants(column)
        center, spread = rules.constants.get(name) or (mean, deviation)
        found.append(Target(name, float(center), float(spread), mean=None if center == mean else mean))
    return tuple(found)


def of_features(summary: TableSummary, rules: TableRules) -> TableSummary:
    """The summary without the columns that are to be predicted."""
    kept = {name: column for name, column in summary.columns.items() if name not in rules.targets}
    return replace(summary, columns=kept)


def fit_labels(
    labels: Sequence[str], rows: int, name: str, rules: TableRules, locate: Locate
) -> tuple[tuple[str, ...], bool]:
    """The classes for these different labels, and whether they are integers."""
    where, _ = locate(name, labels)
    source = f"{where.split(', row')[0]}, column {name}"
    classes = {*rules.spelling.one_name(labels, source).values()}
    require_classes(sorted(classes), rows, source, rules.task)
    integers = all(INTEGER.fullmatch(label) for label in classes)
    return tuple(sorted(classes, key=int) if integers else sorted(classes)), integers
