"""Load a CSV table with a label column and, for a natural federation, a client column.

Rows are held out first. The encoding (`fedadc.data.encoding`) is then fit on the training rows alone, from a summary of
each client's own ones, and applied to all rows. So a site that has only its own rows gets the same samples as a
simulation that has everybody's. The notes of the data set describe the encoding of every column.
"""

from __future__ import annotations

import csv
import reprlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch

from fedadc.data.dataset import Array, Clients, Dataset, Samples
from fedadc.data.encoding import TableEncoding, fit_columns, fit_labels, notes_about, refuse_stray_texts
from fedadc.data.loaders.arguments import file_or_share, path_of
from fedadc.data.loaders.arrays import from_arrays
from fedadc.data.loaders.limits import require_proportionate
from fedadc.data.split import DEFAULT_TEST_SHARE, HeldOut, SplitRows
from fedadc.data.summaries import Fields, TableSummary, merge, summaries
from fedadc.errors import DataError, kind_of_failure, one_line, require, require_file, unknown

MAX_COLUMNS = 100_000
NOTHING = HeldOut()
INTERNED = 10_000  # distinct fields remembered at once


@dataclass(frozen=True)
class Table:
    """The rows of a CSV file."""

    path: Path
    values: Mapping[str, Sequence[str]] = field(repr=False)  # of every column, by its name
    label: str
    client: str | None
    used: tuple[str, ...]  # the columns that become features

    @cached_property
    def labels(self) -> list[str]:
        return _stripped(self.values[self.label], self.path, "label")

    @cached_property
    def owners(self) -> Array | None:
        """The client of every row, in a natural federation."""
        if self.client is None or self.client not in self.values:
            return None
        owners = np.array(_stripped(self.values[self.client], self.path, "client"))
        missing = owners == ""
        require(not missing.any(), f"{self.path}, row {int(missing.argmax()) + 2}: the client is missing.", DataError)
        return owners

    @cached_property
    def fields(self) -> dict[str, Fields]:
        return {name: Fields.read(self.values[name]) for name in self.used}

    def split(self, held_out: HeldOut) -> SplitRows:
        """The rows of every split.

        A client holds out shares of its labels as they are written: whether "01" and "1" are one number or two names
        depends on the other clients.
        """
        if self.owners is not None:
            code = {label: i for i, label in enumerate(dict.fromkeys(self.labels))}
            return held_out.rows(np.array([code[label] for label in self.labels]), self.owners)
        classes, integers = fit_labels(sorted(set(self.labels)), self.label, self.locate)
        return held_out.rows(TableEncoding((), self.label, None, classes, integers).codes(self.labels, str(self.path)))

    def summaries(self, rows: Array, as_text: Collection[str] = ()) -> list[TableSummary]:
        """The summaries of all clients, each made of its own rows among these; without clients, one of all rows."""
        clients = [rows]
        if self.owners is not None:
            owner = np.unique(self.owners[rows], return_inverse=True)[1].reshape(-1)
            shares = Clients.from_owner(owner, int(owner.max()) + 1)
            clients = [rows[shares[k]] for k in range(len(shares))]
        return summaries(self.fields, self.labels, clients, as_text)

    def locate(self, column: str, texts: Collection[str]) -> tuple[str, str]:
        """The first row in which a column has one of these texts, and the text."""
        wanted = set(texts)
        found = ((row, value.strip()) for row, value in enumerate(self.values[column], start=2))
        row, text = next(((row, text) for row, text in found if text in wanted), (None, min(wanted)))
        return "a row of another client" if row is None else f"{self.path}, row {row}", text

    def samples(self, encoding: TableEncoding) -> Samples:
        """All rows, encoded."""
        widest = max(encoding.columns, key=lambda column: column.width)
        rows = len(self.labels)
        require_proportionate(
            4 * rows * encoding.width,
            self.path.stat().st_size,
            f"{self.path}: {encoding.width} features of {rows} rows, {widest.width} of them for column {widest.name},",
            f"leave out such columns with drop: [{widest.name}]",
        )
        x = encoding.features(self.fields, str(self.path))
        return Samples(torch.from_numpy(x), torch.from_numpy(encoding.codes(self.labels, str(self.path))))


def csv_table(
    path: Path,
    label: str,
    client: str | None = None,
    test: Path | None = None,
    drop: list[str] | None = None,
    scale: dict[str, list[float]] | None = None,
    held_out: HeldOut = NOTHING,
    fit_on: Collection[str] | None = None,  # clients whose rows settle the encoding; None: all
) -> Dataset:
    """your own table: a CSV file with a label column and, optionally, a client column"""
    table, scale = read_table(path, label, client, drop, scale), scale or {}
    rows = table.split(held_out)
    fitted = rows.train
    if fit_on is not None and table.owners is not None:
        fitted = fitted[np.isin(table.owners[fitted], list(fit_on))]
        require(len(fitted) > 0, f"{path} has no training rows of {', '.join(fit_on)[:60]}.", DataError)
    summary = merge(table.summaries(fitted))
    refuse_stray_texts(summary, scale, table.locate)
    if summary.mixed:
        summary = merge(table.summaries(fitted, as_text=summary.mixed))
    encoding = fit_encoding(summary, table, scale)
    samples = table.samples(encoding)
    data = from_arrays(samples.x, samples.y, owners=table.owners, name=path.name)
    data = replace(data, classes=encoding.classes, encoding=encoding, notes=notes_about(encoding, summary))
    if test is not None:
        further = csv_like(test, data)
        data = replace(data, test=further.train, test_owners=further.owners)
    return held_out.divide(data, rows)


def from_csv(
    path: str | Path,
    label: str,
    client: str | None = None,
    test: str | Path | float | None = None,
    validation: float | None = None,
    drop: Sequence[str] | None = None,
    scale: Mapping[str, Sequence[float]] | None = None,
    seed: int = 0,
) -> Dataset:
    """A data set from a CSV file with a label column and, for a natural federation, a client column.

    `test` is a file or the share to hold out (default: 20 %; 0: none); `validation` is a share of the rest. Nothing
    about held out rows enters the encoding of the columns, so the shares cannot be held out later. `scale` has the
    center and the spread of number columns, {"age": (40, 12)}.
    """
    file, share = file_or_share(test)
    held_out = HeldOut(DEFAULT_TEST_SHARE if test is None else share, validation, seed)
    require(not isinstance(drop, str), f"drop must be a list of columns, not {drop!r:.60}.")
    require(
        scale is None or isinstance(scale, Mapping),
        f"scale must map columns to (center, spread), not {scale!r:.60}.",
    )
    constants = cast(dict[str, list[float]], dict(scale or {}))
    return csv_table(path_of(path), label, client, file, list(drop or ()), constants, held_out)


def fit_encoding(summary: TableSummary, table: Table, scale: Mapping[str, Sequence[float]]) -> TableEncoding:
    """The encoding that all clients use, from their merged summary."""
    classes, integers = fit_labels(summary.labels, table.label, table.locate)
    return TableEncoding(fit_columns(summary, scale), table.label, table.client, classes, integers)


def csv_like(path: Path, like: Dataset) -> Dataset:
    """A data set from a CSV file, with the columns and classes of an existing one."""
    encoding = like.encoding
    assert encoding is not None
    values = read_columns(path)
    used = tuple(column.name for column in encoding.columns)
    missing = [name for name in (encoding.label, *used) if name not in values]
    require(not missing, f"{path} lacks the column {', '.join(missing)}.", DataError)
    table = Table(path, values, encoding.label, encoding.client, used)
    samples = table.samples(encoding)
    return Dataset(path.name, samples, like.classes, None, None, like.normalization, table.owners, encoding=encoding)


def read_table(
    path: Path, label: str, client: str | None, drop: Sequence[str] | None, scale: Mapping[str, Sequence[float]] | None
) -> Table:
    """The table in a file, with these columns."""
    values = read_columns(path)
    for name in filter(None, [label, client, *(drop or []), *(scale or {})]):
        if name not in values and len(values) == 1:
            raise DataError(f"{path} has only one column, {[*values]}; separate columns by commas.")
        if name not in values:
            raise unknown(f"{path}: column", name, values)
    used = tuple(name for name in values if name not in {label, client, *(drop or [])})
    require(bool(used), f"{path} has no feature column left besides the label, client and dropped columns.")
    return Table(path, values, label, client, used)


def read_columns(path: Path) -> dict[str, list[str]]:
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


def _stripped(values: Sequence[str], path: Path, what: str) -> list[str]:
    """The values without white space around them. Long ones are refused: a NumPy array of them would be large."""
    stripped = [v.strip() for v in values]
    longest = max(range(len(stripped)), key=lambda row: len(stripped[row]))
    require_proportionate(
        4 * len(stripped) * len(stripped[longest]),
        path.stat().st_size,
        f"{path}, row {longest + 2}: a {what} of {len(stripped[longest])} characters",
        f"use short {what} names",
    )
    return stripped
