"""Load a CSV table with a label column and, for a natural federation, a client column.

Columns are encoded in the same way for all clients. The encoding depends on the config and on which values occur, never
on statistics of the pooled data:

- A number becomes (value - center) / spread, with the constants of `data.scale`; without them it is not changed.
- A missing number becomes the center, and an extra indicator column is set to 1.
- A text column becomes one column per category. A missing text is a category of its own.

The notes of the data set describe the encoding of every column.
"""

from __future__ import annotations

import csv
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedadc.data.dataset import Array, Dataset
from fedadc.data.loaders.arrays import from_arrays
from fedadc.data.loaders.limits import require_proportionate
from fedadc.errors import DataError, FedadcError, kind_of_failure, one_line, require, require_file, unknown

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
MISSING_CATEGORY = "(missing)"
MAX_COLUMNS = 100_000
INTEGER = re.compile(r"[+-]?\d{1,18}")  # every number of 18 digits fits into int64
MAX_MAGNITUDE = 1e30  # larger values would overflow in float32 arithmetic
INTERNED = 10_000  # distinct fields remembered at once


@dataclass(frozen=True)
class Column:
    """How one column is encoded as features."""

    name: str
    categories: tuple[str, ...] | None  # None: a numeric column
    has_missing: bool
    center: float = 0.0
    spread: float = 1.0
    scaled: bool = False

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 + self.has_missing if self.categories is None else len(self.categories)

    def encode(self, values: Sequence[str], where: str) -> Array:
        """The features of these values, [rows, width]."""
        missing = np.array([v.strip().lower() in MISSING for v in values])
        if self.categories is not None:
            code = {c: i for i, c in enumerate(self.categories)}
            one_hot = np.zeros((len(values), len(self.categories)), dtype=np.float32)
            for row, value in enumerate(values):  # a category that does not occur in training is all zeros
                position = code.get(MISSING_CATEGORY if missing[row] else value.strip())
                if position is not None:
                    one_hot[row, position] = 1
            return one_hot
        numbers = np.full(len(values), self.center)
        for row in np.flatnonzero(~missing).tolist():
            number = _number(values[row])
            if number is None:
                value = reprlib.repr(values[row])
                raise DataError(f"{where}, row {row + 2}, column {self.name}: {value} is not a number.")
            numbers[row] = number
        scaled = ((numbers - self.center) / self.spread).astype(np.float32)[:, None]
        return np.hstack([scaled, missing[:, None].astype(np.float32)]) if self.has_missing else scaled

    def describe(self, values: Sequence[str]) -> str:
        """One line about the encoding, for the notes of the data set."""
        if self.categories is not None:
            return f"{self.name}: text, {len(self.categories)} categories"
        numbers = np.fromiter((n for v in values if (n := _number(v)) is not None), dtype=np.float64)
        low, high = (numbers.min(), numbers.max()) if len(numbers) else (0, 0)
        text = f"{self.name}: number, {low:g} to {high:g}"
        text += f", scaled by ({self.center:g}, {self.spread:g})" if self.scaled else ", not scaled"
        return text + (", missing values marked" if self.has_missing else "")


def csv_table(
    path: Path,
    label: str,
    client: str | None = None,
    test: Path | None = None,
    drop: list[str] | None = None,
    scale: dict[str, list[float]] | None = None,
) -> Dataset:
    """your own table: a CSV file with a label column and, optionally, a client column"""
    values = _read(path)
    for name in filter(None, [label, client, *(drop or []), *(scale or {})]):
        if name not in values and len(values) == 1:
            raise DataError(f"{path} has only one column, {[*values]}; separate columns by commas.")
        if name not in values:
            raise unknown(f"{path}: column", name, values)
    used = [name for name in values if name not in {label, client, *(drop or [])}]
    require(bool(used), f"{path} has no feature column left besides the label, client and dropped columns.")
    columns = [_column(path, name, values[name], scale or {}) for name in used]
    x, labels = _features(path, columns, values), _labels(values[label], path)
    test_pair, test_owners, as_text = None, None, labels.dtype.kind == "U"
    if test is not None:
        test_values = _read(test)
        missing = [name for name in [label, *used] if name not in test_values]
        require(not missing, f"{test} lacks the column {', '.join(missing)}.", DataError)
        test_pair = _features(test, columns, test_values), _labels(test_values[label], test, as_text)
        test_owners = _texts(test_values[client], test, "client") if client in test_values else None
    owners = None if client is None else _texts(values[client], path, "client")
    data = from_arrays(x, labels, test_pair, owners=owners, test_owners=test_owners, name=path.name)
    notes = [c.describe(values[c.name]) for c in columns]
    wide = [c.name for c in columns if c.categories is None and not c.scaled and _is_wide(values[c.name])]
    if wide:
        notes.append(
            f"{', '.join(wide)} has values beyond ±10 and is not scaled: training may be slow or diverge; set "
            f"data.scale, e.g. {{{wide[0]}: [center, spread]}}"
        )
    return replace(data, notes=tuple(notes))


def _read(path: Path) -> dict[str, list[str]]:
    """The values of every column, by name."""
    require_file(path, "data")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = (row for row in csv.reader(_lines(stream, path), strict=True) if row)
            header = [name.strip() for name in next(rows, [])]
            require(
                len(header) <= MAX_COLUMNS,
                f"{path} has {len(header)} columns; at most {MAX_COLUMNS} are allowed.",
                DataError,
            )
            columns: dict[str, list[str]] = {name: [] for name in header}
            duplicates = [name for name, count in Counter(header).items() if count > 1]
            require(
                not duplicates, f"{path}: two columns have the same name, {reprlib.repr(duplicates[:1])}.", DataError
            )
            _fill([*columns.values()], rows, path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise kind_of_failure(error)(f"{path} is not a CSV file in UTF-8 ({one_line(error)}).") from error
    require(bool(header) and bool(columns[header[0]]), f"{path} needs a header and at least one row.", DataError)
    return columns


def _lines(stream: Iterable[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if "\0" in line:
            raise DataError(f"{path}, line {number} contains a NUL byte; a CSV file must be UTF-8 text.")
        yield line


def _fill(columns: list[list[str]], rows: Iterable[list[str]], path: Path) -> None:
    """Append the rows to the columns. Equal fields share one string object: even a short string takes sixty bytes."""
    interned: dict[str, str] = {}
    for number, row in enumerate(rows, start=2):
        if len(row) != len(columns):
            raise DataError(f"{path}, row {number} has {len(row)} fields, but the header has {len(columns)}.")
        for column, value in zip(columns, row, strict=True):
            column.append(interned.setdefault(value, value))
        if len(interned) > INTERNED:  # most fields differ, so that interning saves no memory
            interned.clear()


def _features(path: Path, columns: Sequence[Column], values: Mapping[str, Sequence[str]]) -> Array:
    rows = len(values[columns[0].name])
    widths = [column.width for column in columns]
    widest = columns[int(np.argmax(widths))]
    require_proportionate(
        4 * rows * sum(widths),
        path.stat().st_size,
        f"{path}: {sum(widths)} features of {rows} rows, {widest.width} of them for column {widest.name},",
        f"leave out such columns with data.drop: [{widest.name}]",
    )
    x = np.empty((rows, sum(widths)), dtype=np.float32)
    for column, end in zip(columns, np.cumsum(widths).tolist(), strict=True):
        x[:, end - column.width : end] = column.encode(values[column.name], str(path))
    return x


def _column(path: Path, name: str, values: Sequence[str], scale: Mapping[str, Sequence[float]]) -> Column:
    present = [v.strip() for v in values if v.strip().lower() not in MISSING]
    has_missing = len(present) < len(values)
    texts = [v for v in present if _number(v) is None]
    if texts:
        if name in scale or 2 * len(texts) <= len(present):
            why = "data.scale needs numbers" if name in scale else "most values of the column are numbers"
            row = next(i for i, v in enumerate(values, start=2) if v.strip() == texts[0])
            kind = FedadcError if name in scale else DataError
            raise kind(f"{path}, row {row}, column {name}: {reprlib.repr(texts[0])} is not a number, but {why}.")
        categories = sorted(set(present)) + ([MISSING_CATEGORY] if has_missing else [])
        return Column(name, tuple(categories), has_missing)
    if name not in scale:
        return Column(name, None, has_missing)
    constants = scale[name]
    require(
        len(constants) == 2 and constants[1] > 0,
        f"data.scale.{name} must be [center, spread] with a spread above 0, not {list(constants)}.",
    )
    return Column(name, None, has_missing, constants[0], constants[1], scaled=True)


def _labels(values: Sequence[str], path: Path, as_text: bool = False) -> Array:
    """Integer labels if all values are integers, otherwise text. `as_text`: the training labels are text."""
    text_rows = [row for row, v in enumerate(values, start=2) if not INTEGER.fullmatch(v.strip())]
    missing = [row for row in text_rows if values[row - 2].strip().lower() in MISSING]
    if text_rows == missing != [] and len(text_rows) < len(values):  # among integer labels, "nan" is not a class name
        row = text_rows[0]
        raise DataError(f"{path}, row {row}: the label is missing (its value is {values[row - 2].strip()!r}).")
    if not as_text and not text_rows:
        return np.fromiter((int(v.strip()) for v in values), dtype=np.int64, count=len(values))
    return _texts(values, path, "label")


def _texts(values: Sequence[str], path: Path, what: str) -> Array:
    """The stripped values as a NumPy array, whose memory is proportional to the length of the longest value."""
    stripped = [v.strip() for v in values]
    longest = max(range(len(stripped)), key=lambda row: len(stripped[row]))
    require_proportionate(
        4 * len(stripped) * len(stripped[longest]),
        path.stat().st_size,
        f"{path}, row {longest + 2}: a {what} of {len(stripped[longest])} characters",
        f"use short {what} names",
    )
    texts = np.array(stripped)
    empty = texts == ""
    require(not empty.any(), f"{path}, row {int(empty.argmax()) + 2}: the {what} is missing.", DataError)
    return texts


def _number(text: str) -> float | None:
    """The number that a field contains; None if it contains none, or one that is too large."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= MAX_MAGNITUDE else None


def _is_wide(values: Sequence[str]) -> bool:
    return any(abs(n) > 10 for v in values if (n := _number(v)) is not None)
