"""How the rows of a table become features and classes: decided once, from a merged summary, and the same everywhere.

- A number becomes (value - center) / spread, with the constants of `scale`; without them it is not changed.
- A missing number becomes the center, and an extra indicator column is set to 1 if training has missing numbers.
- A text column becomes one column per category. A missing text is a category of its own. A category that does not
  occur in training is all zeros.
- The classes are the labels, sorted: as numbers if all of them are integers, otherwise as texts.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np

from fedadc.data.summaries import Array, ColumnSummary, Fields, TableSummary, is_missing
from fedadc.errors import DataError, require

MISSING_CATEGORY = "(missing)"
INTEGER = re.compile(r"[+-]?\d{1,18}")  # every number of 18 digits fits into int64
# where a column has one of these texts, and which of them: ("table.csv, row 7", "abc")
Locate = Callable[[str, Collection[str]], tuple[str, str]]


@dataclass(frozen=True)
class Column:
    """How one column is encoded as features."""

    name: str
    categories: tuple[str, ...] | None  # None: a numeric column
    has_missing: bool
    center: float = 0.0
    spread: float = 1.0
    scaled: bool = False

    def __post_init__(self) -> None:
        wrong = f"column {self.name!r:.40} has constants or categories that cannot be"
        require(isfinite(self.center) and 0 < self.spread < inf, f"{wrong}.", DataError)
        distinct = self.categories is None or len(set(self.categories)) == len(self.categories) > 0
        require(distinct, f"{wrong}.", DataError)

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 + self.has_missing if self.categories is None else len(self.categories)

    def encode(self, fields: Fields, where: str) -> Array:
        """The features of these fields, [rows, width]."""
        if self.categories is not None:
            return self._one_hot(fields)
        stray = np.flatnonzero(np.isnan(fields.numbers) & ~fields.missing)
        if len(stray):
            row = int(stray[0])
            text = reprlib.repr(fields.texts[row])
            raise DataError(f"{where}, row {row + 2}, column {self.name}: {text} is not a number.")
        numbers = np.where(fields.missing, self.center, fields.numbers)
        with np.errstate(over="ignore"):
            scaled = ((numbers - self.center) / self.spread).astype(np.float32)[:, None]
        if not np.isfinite(scaled).all():
            row = int(np.isfinite(scaled).argmin())
            text = reprlib.repr(fields.texts[row])
            raise DataError(f"{where}, row {row + 2}, column {self.name}: {text} is too large when it is scaled.")
        return np.hstack([scaled, fields.missing[:, None].astype(np.float32)]) if self.has_missing else scaled

    def _one_hot(self, fields: Fields) -> Array:
        assert self.categories is not None
        code = {category: i for i, category in enumerate(self.categories)}
        code_of = {t: code.get(MISSING_CATEGORY if is_missing(t) else t.strip(), -1) for t in set(fields.texts)}
        codes = np.fromiter(map(code_of.__getitem__, fields.texts), dtype=np.int64, count=len(fields.texts))
        known = np.flatnonzero(codes >= 0)
        one_hot = np.zeros((len(codes), len(self.categories)), dtype=np.float32)
        one_hot[known, codes[known]] = 1
        return one_hot

    def describe(self, summary: ColumnSummary) -> str:
        """One line about the encoding, for the notes of the data set."""
        if self.categories is not None:
            return f"{self.name}: text, {len(self.categories)} categories"
        text = f"{self.name}: number"
        if summary.low is not None and summary.high is not None:
            text += f", {summary.low:g} to {summary.high:g}"
        text += f", scaled by ({self.center:g}, {self.spread:g})" if self.scaled else ", not scaled"
        return text + (", missing values marked" if self.has_missing else "")


@dataclass(frozen=True)
class TableEncoding:
    """The features and classes of a table's rows."""

    columns: tuple[Column, ...]
    label: str  # the name of the label column
    client: str | None  # the name of the client column
    classes: tuple[str, ...]
    integers: bool  # whether the labels are integers: then +5 and 5 are one class

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        require(len(set(names)) == len(names), "two columns of an encoding have the same name.", DataError)

    @property
    def width(self) -> int:
        """The number of features."""
        return sum(column.width for column in self.columns)

    def features(self, fields: Mapping[str, Fields], where: str) -> Array:
        """The features of all rows, float32."""
        x = np.empty((len(fields[self.columns[0].name].texts), self.width), dtype=np.float32)
        end = 0
        for column in self.columns:
            start, end = end, end + column.width
            x[:, start:end] = column.encode(fields[column.name], where)
        return x

    def codes(self, labels: Sequence[str], where: str) -> Array:
        """The class of every row, int64, from its label."""
        code = {name: i for i, name in enumerate(self.classes)}
        code_of = {label: code.get(_class_name(label, self.integers), -1) for label in set(labels)}
        codes = np.fromiter(map(code_of.__getitem__, labels), dtype=np.int64, count=len(labels))
        if (codes < 0).any():
            row = int((codes < 0).argmax())
            known = ", ".join(self.classes[:10]) + (", ..." if len(self.classes) > 10 else "")
            raise DataError(
                f"{where}, row {row + 2}: the label {reprlib.repr(labels[row])} does not occur in training, "
                f"whose labels are {known}."
            )
        return codes


def refuse_stray_texts(summary: TableSummary, scale: Mapping[str, Sequence[float]], locate: Locate) -> None:
    """Refuse a text in a column of numbers, and constants for a column that has texts."""
    for name, column in summary.columns.items():
        if column.words and (name in scale or column.texts <= column.numbers):
            why = "scale needs numbers" if name in scale else "most values of the column are numbers"
            where, text = locate(name, column.words)
            raise DataError(f"{where}, column {name}: {reprlib.repr(text)} is not a number, but {why}.")


def notes_about(encoding: TableEncoding, summary: TableSummary) -> tuple[str, ...]:
    """What becomes of every column, and a warning about large numbers."""
    notes, wide = [], []
    for column in encoding.columns:
        found = summary.columns[column.name]
        notes.append(column.describe(found))
        if column.categories is None and not column.scaled and max(-(found.low or 0), found.high or 0) > 10:
            wide.append(column.name)
    if wide:
        has, are = ("has", "is") if len(wide) == 1 else ("have", "are")
        notes.append(
            f"{', '.join(wide)} {has} values beyond ±10 and {are} not scaled: training may be slow or "
            f"diverge; set the scale of the data, e.g. {{{wide[0]}: [center, spread]}}"
        )
    return tuple(notes)


def fit_columns(summary: TableSummary, scale: Mapping[str, Sequence[float]]) -> tuple[Column, ...]:
    """The encoding of every column of a table with this summary, in which no column is mixed."""
    for name, constants in scale.items():
        require(
            _are_constants(constants),
            f"scale.{name} must be [center, spread] with a spread above 0, not {constants!r:.60}.",
        )
    return tuple(_column(name, column, scale.get(name)) for name, column in summary.columns.items())


def _are_constants(values: Any) -> bool:
    numbers = isinstance(values, list | tuple) and all(isinstance(v, int | float) and isfinite(v) for v in values)
    return numbers and len(values) == 2 and values[1] > 0


def _column(name: str, summary: ColumnSummary, constants: Sequence[float] | None) -> Column:
    has_missing = summary.missing > 0
    if summary.words:
        return Column(name, summary.words + ((MISSING_CATEGORY,) if has_missing else ()), has_missing)
    center, spread = constants or (0.0, 1.0)
    return Column(name, None, has_missing, center, spread, scaled=constants is not None)


def fit_labels(labels: Sequence[str], name: str, locate: Locate) -> tuple[tuple[str, ...], bool]:
    """The classes for these different labels, and whether they are integers."""
    others = [label for label in labels if not INTEGER.fullmatch(label)]
    missing = [label for label in others if is_missing(label)]
    if missing != others or others == list(labels):  # the labels are texts: a class may be called "nan"
        missing = [label for label in missing if label == ""]
    if missing:
        where, label = locate(name, missing)
        raise DataError(f"{where}: the label is missing (its value is {label!r}).")
    integers = not others
    classes = {_class_name(label, integers) for label in labels}
    return tuple(sorted(classes, key=int) if integers else sorted(classes)), integers


def _class_name(label: str, integers: bool) -> str:
    return str(int(label)) if integers and INTEGER.fullmatch(label) else label
