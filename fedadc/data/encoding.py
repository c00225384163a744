"""How the rows of a table become features and classes: decided once, from a merged summary, and the same everywhere.

- A number becomes (value - center) / spread. By default the constants are the mean and the standard deviation over all
  clients' training rows; they may be given, be every client's own, or be left out.
- A missing number becomes the center, and an extra indicator column is set to 1 if training has missing numbers.
- A text column becomes one column per category. A missing text is a category of its own. A category that does not
  occur in training is all zeros. Columns of numbers that are listed as categories are treated alike.
- The classes are the labels, sorted: as numbers if all of them are integers, otherwise as texts. In a regression, label
  columns are numbers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import numpy as np

from fedadc.data.columns import Array, Fields
from fedadc.data.rules import are_constants
from fedadc.data.spelling import DEFAULT_SPELLING, Spelling, likeness
from fedadc.data.summaries import ColumnSummary
from fedadc.errors import DataError, require

MISSING_CATEGORY = "(missing)"
ROWS_AT_ONCE = 512
Constants = tuple[float, float]  # center and spread


@dataclass(frozen=True)
class Column:
    """How one column is encoded as features."""

    name: str
    categories: tuple[str, ...] | None  # None: a numeric column
    has_missing: bool
    center: float = 0.0
    spread: float = 1.0
    scaled: bool = False
    by_client: bool = False  # every client has its own center and spread

    def __post_init__(self) -> None:
        wrong = f"column {self.name!r:.40} has constants or categories that cannot be"
        require(isfinite(self.center) and 0 < self.spread < inf, f"{wrong}.", DataError)
        distinct = self.categories is None or len(set(self.categories)) == len(self.categories) > 0
        require(distinct, f"{wrong}.", DataError)

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 + self.has_missing if self.categories is None else len(self.categories)

    def encode(self, fields: Fields, where: str, first_row: int = 2, constants: tuple[Any, Any] | None = None) -> Array:
        """The features of these fields, float32 [rows, width]; `constants`: center and spread, if not the column's."""
        if self.categories is not None:
            return self._one_hot(fields)
        center, spread = constants or (self.center, self.spread)
        stray = np.flatnonzero(fields.codes >= 0).tolist() if fields.words else []
        if stray:
            row = stray[0]
            text = reprlib.repr(fields.text(row))
            raise DataError(f"{where}, row {row + first_row}, column {self.name}: {text} is not a number.")
        with np.errstate(over="ignore"):
            scaled = ((fields.numbers - center) / spread).astype(np.float32)
        finite = np.isfinite(scaled)
        if not finite.all():
            gaps = np.isnan(fields.numbers)
            large = np.flatnonzero(~finite & ~gaps)
            if len(large):
                row = int(large[0])
                text = reprlib.repr(fields.text(row))
                raise DataError(
                    f"{where}, row {row + first_row}, column {self.name}: {text} is too large when it is scaled."
                )
            scaled[gaps] = 0  # the center
        if not self.has_missing:
            return scaled[:, None]
        return np.stack([scaled, np.isnan(fields.numbers).astype(np.float32)], axis=1)

    def _one_hot(self, fields: Fields) -> Array:
        assert self.categories is not None
        code = {category: i for i, category in enumerate(self.categories)}
        fields = fields.as_texts()
        absent = code.get(MISSING_CATEGORY, -1)  # the last one: a missing field has the code -1
        codes = np.array([*(code.get(word, -1) for word in fields.words), absent])[fields.codes]
        known = np.flatnonzero(codes >= 0)
        one_hot = np.zeros((len(codes), len(self.categories)), dtype=np.float32)
        one_hot[known, codes[known]] = 1
        return one_hot

    def describe(self, summary: ColumnSummary) -> str:
        """One line about the encoding, for the notes of the data set."""
        if self.categories is not None:
            marked = ", missing values are one" if MISSING_CATEGORY in self.categories else ""
            return f"{self.name}: text, {len(self.categories)} categories{marked}"
        text = f"{self.name}: number"
        if summary.low is not None and summary.high is not None:
            text += f", {summary.low:g} to {summary.high:g}"
        scaled = f", scaled by ({self.center:.12g}, {self.spread:.12g})" if self.scaled else ", not scaled"
        text += ", scaled by every client's own mean and standard deviation" if self.by_client else scaled
        return text + (", missing values marked" if self.has_missing else "")


@dataclass(frozen=True)
class TableEncoding:
    """The features and classes of a table's rows."""

    columns: tuple[Column, ...]
    label: str  # the name of the label column
    client: str | None  # the name of the client column
    classes: tuple[str, ...]
    integers: bool  # whether the labels are integers, which are sorted as such
    spelling: Spelling = DEFAULT_SPELLING
    scales: Mapping[str, tuple[Constants, ...]] = field(default_factory=dict)  # by client, of its own columns
    targets: tuple[str, ...] = ()  # in a regression, the names of the label columns

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        require(len(set(names)) == len(names), "two columns of an encoding have the same name.", DataError)
        own = sum(column.by_client for column in self.columns)
        known = all(len(several) == own and all(map(are_constants, several)) for several in self.scales.values())
        require(known, "the constants of a client are not those of the columns.", DataError)

    @property
    def width(self) -> int:
        """The number of features."""
        return sum(column.width for column in self.columns)

    @property
    def inputs(self) -> set[str]:
        """The columns that the features of a row depend on."""
        own = {self.client} if self.client and any(column.by_client for column in self.columns) else set()
        return {column.name for column in self.columns} | own

    def features(
        self, fields: Callable[[str], Fields], where: str, first_row: int = 2, clients: Fields | None = None
    ) -> Array:
        """The features of all rows, float32 [rows, width]; `fields` gives, or gives away, a column by its name."""
        own = [column.name for column in self.columns if column.by_client]
        scales = self._scales(clients, where, first_row) if own else None
        parts = []
        for column in self.columns:
            constants = None
            if scales is not None and column.by_client:
                at = own.index(column.name)
                constants = scales[:, at, 0], scales[:, at, 1]
            parts.append(column.encode(fields(column.name), where, first_row, constants))
        return _side_by_side(parts, self.width)

    def _scales(self, clients: Fields | None, where: str, first_row: int) -> Array:
        """The center and spread of the client of every row, [rows, columns, 2]."""
        why = "every client has its own scale (scale: per-client)"
        require(clients is not None, f"{where} must name the client of every row: {why}.", DataError)
        assert clients is not None
        known = np.array([word in self.scales for word in clients.words] + [False])[clients.codes]
        if not known.all():
            row = int(known.argmin())
            name = reprlib.repr(clients.text(row))
            raise DataError(f"{where}, row {row + first_row}: the client {name} had no rows in training, but {why}.")
        scales: Array = np.array([self.scales[word] for word in clients.words])[clients.codes]
        return scales

    @property
    def names(self) -> set[str]:
        """The columns of names: the label, unless it is a number, and the client."""
        return {name for name in (self.label, self.client) if name}

    def numbers(self, fields: Callable[[str], Fields], where: str, first_row: int = 2) -> Array:
        """The numbers to predict of every row, float64 [rows, targets]."""
        columns = []
        for name in self.targets:
            found = fields(name)
            stray = np.flatnonzero(np.isnan(found.numbers)).tolist()
            if stray:
                row = stray[0]
                if found.codes[row] < 0:
                    raise DataError(missing_name(where, row + first_row, name, "label"))
                text = reprlib.repr(found.text(row))
                raise DataError(f"{where}, row {row + first_row}, column {name}: the label {text} is not a number.")
            columns.append(found.numbers)
        return np.stack(columns, axis=1)

    def codes(self, labels: Fields, where: str, first_row: int = 2) -> Array:
        """The class of every row, int64, from its label."""
        key: Callable[[str], str] = likeness if self.spelling.merge_names else str
        code = {key(name): i for i, name in enumerate(self.classes)}
        known = [code.get(key(word), -1) for word in labels.words]
        codes: Array = np.array([*known, -1], dtype=np.int64)[labels.codes]
        if (codes < 0).any():
            row = int((codes < 0).argmax())
            shown = ", ".join(self.classes[:10]) + (", ..." if len(self.classes) > 10 else "")
            label = f"the label {reprlib.repr(labels.text(row))} does not occur in training"
            if labels.codes[row] < 0:
                raise DataError(missing_name(where, row + first_row, self.label, "label"))
            raise DataError(f"{where}, row {row + first_row}: {label}, whose labels are {shown}.")
        return codes


def missing_name(where: str, row: int, column: str, what: str) -> str:
    """The sentence about a row without a label or a client."""
    return (
        f"{where}, row {row}, column {column}: the {what} is missing; complete or remove the row, or say with missing "
        "which spellings are missing values."
    )


def _side_by_side(parts: list[Array], width: int) -> Array:
    """The parts as one array, filled in by blocks of rows: a column at a time would visit every page."""
    rows = len(parts[0])
    x = np.empty((rows, width), dtype=np.float32)
    ends = np.cumsum([part.shape[1] for part in parts]).tolist()
    for first in range(0, rows, ROWS_AT_ONCE):
        block = slice(first, first + ROWS_AT_ONCE)
        for part, end in zip(parts, ends, strict=True):
            x[block, end - part.shape[1] : end] = part[block]
    return x
