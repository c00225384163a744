"""A CSV table with a label column and, for a natural federation, a client column.

What is done to the columns is the same for every client and taken from the config and the column names, never from
statistics of pooled data: a number is (value - centre) / spread with the constants of `data.scale`, else as it stands;
a missing number becomes the centre and sets a second column that says so; a text column becomes one column per
category, a missing text its own category. The notes of the data set state it column by column.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedadc.data.dataset import Array, Dataset
from fedadc.data.own import from_arrays
from fedadc.errors import FedadcError, require, unknown

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
MISSING_CATEGORY = "(missing)"
LARGEST = 1e30  # beyond it float32 has no room to compute


@dataclass(frozen=True)
class Column:
    """How one column becomes features."""

    name: str
    categories: tuple[str, ...] | None  # None: a number
    has_missing: bool
    centre: float = 0.0
    spread: float = 1.0
    scaled: bool = False

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
        numbers = np.full(len(values), self.centre)
        for row in np.flatnonzero(~missing).tolist():
            number = _number(values[row])
            require(number is not None, f"{where}, row {row + 2}, column {self.name}: {values[row]!r} is not a number.")
            numbers[row] = number
        scaled = ((numbers - self.centre) / self.spread).astype(np.float32)[:, None]
        return np.hstack([scaled, missing[:, None].astype(np.float32)]) if self.has_missing else scaled

    def describe(self, values: Sequence[str]) -> str:
        if self.categories is not None:
            return f"{self.name}: text, {len(self.categories)} categories"
        numbers = [n for v in values if (n := _number(v)) is not None]
        text = f"{self.name}: number, {min(numbers, default=0):g} to {max(numbers, default=0):g}"
        text += f", scaled by ({self.centre:g}, {self.spread:g})" if self.scaled else ", not scaled"
        return text + (", missing values marked" if self.has_missing else "")


def table(
    path: Path,
    label: str,
    client: str | None = None,
    test: Path | None = None,
    drop: list[str] | None = None,
    scale: dict[str, list[float]] | None = None,
) -> Dataset:
    """your own table: a CSV with a label column and, if you like, a client column"""
    header, rows = _read(path)
    for name in filter(None, [label, client, *(drop or []), *(scale or {})]):
        require(
            name in header or len(header) > 1, f"{path} has one column, {header[0]!r}; columns are parted by commas."
        )
        if name not in header:
            raise unknown(f"{path}: column", name, header)
    used = [name for name in header if name not in {label, client, *(drop or [])}]
    require(bool(used), f"{path} has no column left beside label and client.")
    by_name = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    columns = [_column(path, name, by_name[name], scale or {}) for name in used]
    x = np.hstack([c.encode(by_name[c.name], str(path)) for c in columns])
    labels = _labels(by_name[label], path)
    held, text = None, labels.dtype.kind == "U"
    if test is not None:
        test_header, test_rows = _read(test)
        missing = [n for n in [label, *used] if n not in test_header]
        require(not missing, f"{test} lacks the column {', '.join(missing)}.")
        test_values = {name: [row[i] for row in test_rows] for i, name in enumerate(test_header)}
        held = (
            np.hstack([c.encode(test_values[c.name], str(test)) for c in columns]),
            _labels(test_values[label], test, text=text),
        )
    owners = None if client is None else np.array([v.strip() for v in by_name[client]])
    if owners is not None:
        nobody = np.flatnonzero(owners == "")
        require(len(nobody) == 0, f"{path}, row {[int(r) + 2 for r in nobody[:1]]}: the client is missing.")
    data = from_arrays(x, labels, held, owners=owners, name=path.name)
    notes = [c.describe(by_name[c.name]) for c in columns]
    wide = [c.name for c in columns if c.categories is None and not c.scaled and _is_wide(by_name[c.name])]
    if wide:
        notes.append(
            f"{', '.join(wide)} reaches beyond ±10 and is not scaled: training may be slow or diverge; give "
            f"data.scale, e.g. {{{wide[0]}: [centre, spread]}}"
        )
    return Dataset(data.name, data.train, data.classes, data.test, owners=data.owners, notes=tuple(notes))


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    require(path.is_file(), f"data: there is no file {path}.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = [row for row in csv.reader(stream, strict=True) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedadcError(f"{path} is not a CSV file in UTF-8 ({error}).") from error
    require(len(rows) >= 2, f"{path} needs a header and at least one row.")
    header = [name.strip() for name in rows[0]]
    require(len(set(header)) == len(header), f"{path}: two columns have the same name.")
    for number, row in enumerate(rows[1:], start=2):
        require(len(row) == len(header), f"{path}, row {number}: {len(row)} fields, but the header has {len(header)}.")
    return header, rows[1:]


def _column(path: Path, name: str, values: Sequence[str], scale: Mapping[str, Sequence[float]]) -> Column:
    present = [v.strip() for v in values if v.strip().lower() not in MISSING]
    gap = len(present) < len(values)
    words = [v for v in present if _number(v) is None]
    if words:
        why = "data.scale asks for one" if name in scale else "most of the column are"
        require(
            name not in scale and 2 * len(words) > len(present),
            f"{path}, column {name}: {words[0]!r} is not a number, but {why}.",
        )
        categories = sorted(set(present)) + ([MISSING_CATEGORY] if gap else [])
        return Column(name, tuple(categories), gap)
    if name not in scale:
        return Column(name, None, gap)
    constants = scale[name]
    require(
        len(constants) == 2 and constants[1] > 0,
        f"data.scale.{name} must be [centre, spread] with a spread above 0, not {list(constants)}.",
    )
    return Column(name, None, gap, constants[0], constants[1], scaled=True)


def _labels(values: Sequence[str], path: Path, text: bool = False) -> Array:
    """Integers where all labels are, else text; `text`: training has decided."""
    for row, value in enumerate(values, start=2):
        require(bool(value.strip()), f"{path}, row {row}: the label is missing.")
    stripped = [v.strip() for v in values]
    if not text and all(v.lstrip("+-").isdecimal() and len(v) < 19 for v in stripped):
        return np.array([int(v) for v in stripped])
    return np.array(stripped)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= LARGEST else None


def _is_wide(values: Sequence[str]) -> bool:
    return any(abs(n) > 10 for v in values if (n := _number(v)) is not None)
