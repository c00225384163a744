"""A CSV table with a label column and, for a natural federation, a client column.

What is done to the columns is the same for every client and taken from the config and the column names, never from
statistics of pooled data: a number is (value - center) / spread with the constants of `data.scale`, else as it stands;
a missing number becomes the center and sets a second column that says so; a text column becomes one column per
category, a missing text its own category. The notes of the data set state it column by column.
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
from fedadc.errors import FedadcError, one_line, require, require_file, unknown

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
MISSING_CATEGORY = "(missing)"
MOST_COLUMNS = 100_000
WHOLE = re.compile(r"[+-]?\d{1,18}")  # as many digits as int64 has room for
LARGEST = 1e30  # beyond it float32 has no room to compute


@dataclass(frozen=True)
class Column:
    """How one column becomes features."""

    name: str
    categories: tuple[str, ...] | None  # None: a number
    has_missing: bool
    center: float = 0.0
    spread: float = 1.0
    scaled: bool = False

    @property
    def width(self) -> int:
        return 1 + self.has_missing if self.categories is None else len(self.categories)

    def encode(self, values: Sequence[str], where: str) -> Array:
        missing = np.array([v.strip().lower() in MISSING for v in values])
        if self.categories is not None:
            code = {c: i for i, c in enumerate(self.categories)}
            hot = np.zeros((len(values), len(self.categories)), dtype=np.float32)
            for row, value in enumerate(values):  # a category that training does not have stays all zero
                at = code.get(MISSING_CATEGORY if missing[row] else value.strip())
                if at is not None:
                    hot[row, at] = 1
            return hot
        numbers = np.full(len(values), self.center)
        for row in np.flatnonzero(~missing).tolist():
            number = _number(values[row])
            if number is None:
                shown = reprlib.repr(values[row])
                raise FedadcError(f"{where}, row {row + 2}, column {self.name}: {shown} is not a number.")
            numbers[row] = number
        scaled = ((numbers - self.center) / self.spread).astype(np.float32)[:, None]
        return np.hstack([scaled, missing[:, None].astype(np.float32)]) if self.has_missing else scaled

    def describe(self, values: Sequence[str]) -> str:
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
    """your own table: a CSV with a label column and, if you like, a client column"""
    values = _read(path)
    for name in filter(None, [label, client, *(drop or []), *(scale or {})]):
        require(name in values or len(values) > 1, f"{path} has one column, {[*values]}; columns are parted by commas.")
        if name not in values:
            raise unknown(f"{path}: column", name, values)
    used = [name for name in values if name not in {label, client, *(drop or [])}]
    require(bool(used), f"{path} has no column left beside label and client.")
    columns = [_column(path, name, values[name], scale or {}) for name in used]
    x, labels = _features(path, columns, values), _labels(values[label], path)
    held, held_by, text = None, None, labels.dtype.kind == "U"
    if test is not None:
        more = _read(test)
        missing = [n for n in [label, *used] if n not in more]
        require(not missing, f"{test} lacks the column {', '.join(missing)}.")
        held = _features(test, columns, more), _labels(more[label], test, text=text)
        held_by = _texts(more[client], test, "client") if client in more else None
    owners = None if client is None else _texts(values[client], path, "client")
    data = from_arrays(x, labels, held, owners=owners, test_owners=held_by, name=path.name)
    notes = [c.describe(values[c.name]) for c in columns]
    wide = [c.name for c in columns if c.categories is None and not c.scaled and _is_wide(values[c.name])]
    if wide:
        notes.append(
            f"{', '.join(wide)} reaches beyond ±10 and is not scaled: training may be slow or diverge; give "
            f"data.scale, e.g. {{{wide[0]}: [center, spread]}}"
        )
    return replace(data, notes=tuple(notes))


def _read(path: Path) -> dict[str, list[str]]:
    """The columns by name."""
    require_file(path, "data")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = (row for row in csv.reader(_lines(stream, path), strict=True) if row)
            header = [name.strip() for name in next(rows, [])]
            require(len(header) <= MOST_COLUMNS, f"{path} has {len(header)} columns, more than {MOST_COLUMNS}.")
            columns: dict[str, list[str]] = {name: [] for name in header}
            twice = [name for name, times in Counter(header).items() if times > 1]
            require(not twice, f"{path}: two columns have the same name, {reprlib.repr(twice[:1])}.")
            _fill([*columns.values()], rows, path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedadcError(f"{path} is not a CSV file in UTF-8 ({one_line(error)}).") from error
    require(bool(header) and bool(columns[header[0]]), f"{path} needs a header and at least one row.")
    return columns


def _lines(stream: Iterable[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if "\0" in line:
            raise FedadcError(f"{path}, line {number} holds a NUL byte; a CSV file in UTF-8 is text.")
        yield line


def _fill(columns: list[list[str]], rows: Iterable[list[str]], path: Path) -> None:
    """Fields that read alike become one object: a field of two bytes would take sixty of memory."""
    known: dict[str, str] = {}
    for number, row in enumerate(rows, start=2):
        if len(row) != len(columns):
            raise FedadcError(f"{path}, row {number}: {len(row)} fields, but the header has {len(columns)}.")
        for column, value in zip(columns, row, strict=True):
            column.append(known.setdefault(value, value))
        if len(known) > 10_000:  # most are different: nothing to be saved
            known.clear()


def _features(path: Path, columns: Sequence[Column], values: Mapping[str, Sequence[str]]) -> Array:
    rows = len(values[columns[0].name])
    widths = [column.width for column in columns]
    widest = columns[int(np.argmax(widths))]
    require_proportionate(
        4 * rows * sum(widths),
        path.stat().st_size,
        f"{path}: {sum(widths)} features of {rows} rows, {widest.width} of them for column {widest.name},",
        f"leave such columns out, data.drop: [{widest.name}]",
    )
    x = np.empty((rows, sum(widths)), dtype=np.float32)
    for column, end in zip(columns, np.cumsum(widths).tolist(), strict=True):
        x[:, end - column.width : end] = column.encode(values[column.name], str(path))
    return x


def _column(path: Path, name: str, values: Sequence[str], scale: Mapping[str, Sequence[float]]) -> Column:
    present = [v.strip() for v in values if v.strip().lower() not in MISSING]
    gap = len(present) < len(values)
    words = [v for v in present if _number(v) is None]
    if words:
        if name in scale or 2 * len(words) <= len(present):
            why = "data.scale asks for one" if name in scale else "most of the column are"
            row = next(i for i, v in enumerate(values, start=2) if v.strip() == words[0])
            raise FedadcError(f"{path}, row {row}, column {name}: {reprlib.repr(words[0])} is not a number, but {why}.")
        categories = sorted(set(present)) + ([MISSING_CATEGORY] if gap else [])
        return Column(name, tuple(categories), gap)
    if name not in scale:
        return Column(name, None, gap)
    constants = scale[name]
    require(
        len(constants) == 2 and constants[1] > 0,
        f"data.scale.{name} must be [center, spread] with a spread above 0, not {list(constants)}.",
    )
    return Column(name, None, gap, constants[0], constants[1], scaled=True)


def _labels(values: Sequence[str], path: Path, text: bool = False) -> Array:
    """Integers where all labels are, else text; `text`: training has decided."""
    words = [row for row, v in enumerate(values, start=2) if not WHOLE.fullmatch(v.strip())]
    missing = [row for row in words if values[row - 2].strip().lower() in MISSING]
    if words == missing != [] and len(words) < len(values):  # among numbers, "nan" is no name
        raise FedadcError(f"{path}, row {words[0]}: the label is missing (it says {values[words[0] - 2].strip()!r}).")
    if not text and not words:
        return np.fromiter((int(v.strip()) for v in values), dtype=np.int64, count=len(values))
    return _texts(values, path, "label")


def _texts(values: Sequence[str], path: Path, what: str) -> Array:
    """NumPy gives every text the room of the longest."""
    stripped = [v.strip() for v in values]
    longest = max(range(len(stripped)), key=lambda row: len(stripped[row]))
    require_proportionate(
        4 * len(stripped) * len(stripped[longest]),
        path.stat().st_size,
        f"{path}, row {longest + 2}: a {what} of {len(stripped[longest])} characters",
        f"a {what} is a short name",
    )
    texts = np.array(stripped)
    nothing = texts == ""
    require(not nothing.any(), f"{path}, row {int(nothing.argmax()) + 2}: the {what} is missing.")
    return texts


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= LARGEST else None


def _is_wide(values: Sequence[str]) -> bool:
    return any(abs(n) > 10 for v in values if (n := _number(v)) is not None)
