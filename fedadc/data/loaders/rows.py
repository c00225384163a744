"""The features of new rows of a table, which need no labels: from a CSV file, a DataFrame or columns by name."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedadc.data.columns import Fields, GrowingColumn
from fedadc.data.encoding import TableEncoding
from fedadc.data.loaders.csv import read_encoded
from fedadc.data.spelling import Spelling
from fedadc.errors import DataError, require


def features_of(rows: Path | Any, encoding: TableEncoding) -> Tensor:
    """The features of rows, encoded as those of training; further columns of the table are left out."""
    columns, _ = columns_of(rows, encoding)
    return encoded(columns, encoding, str(rows) if isinstance(rows, Path) else "the table")


def columns_of(rows: Path | Any, encoding: TableEncoding) -> tuple[dict[str, Fields], list[str]]:
    """The columns of rows that an encoding has, and the names of the others."""
    if isinstance(rows, Path):
        return read_encoded(rows, encoding, label=False)
    columns = fields_of(rows, encoding.spelling, () if encoding.client is None else (encoding.client,))
    used = encoding.inputs
    return {n: c for n, c in columns.items() if n in used}, [n for n in columns if n not in used]


def encoded(columns: Mapping[str, Fields], encoding: TableEncoding, where: str) -> Tensor:
    """The features of the rows with these columns; rows are counted as in a file with a header."""
    missing = [column.name for column in encoding.columns if column.name not in columns]
    require(not missing, f"{where} lacks the column {', '.join(missing)[:200]}.", DataError)
    clients = None if encoding.client is None else columns.get(encoding.client)
    return torch.from_numpy(np.array(encoding.features(columns.__getitem__, where, clients=clients), order="C"))


def fields_of(table: Any, spelling: Spelling, names: Collection[str] = ()) -> dict[str, Fields]:
    """The columns of a DataFrame, or of a mapping from names to values, as if they were read from a CSV file.

    `names`: columns of names, such as clients.
    """
    known = isinstance(table, Mapping) or hasattr(table, "columns")
    require(known, f"rows must be a path, a DataFrame or columns by name, not {type(table).__name__}.")
    header = [*table]
    require(bool(header), "the table has no columns.", DataError)
    own = {name: str(name).strip() for name in header}
    ((twice, many),) = Counter(str(name).strip() for name in header).most_common(1)
    require(many == 1, f"two columns of the table have the same name, {twice!r:.60}.", DataError)
    for name in header:
        _require_values(own[name], table[name])
    columns = {own[name]: _fields(table[name], spelling, own[name] in names) for name in header}
    lengths = {name: len(values) for name, values in columns.items()}
    first, *others = lengths
    for name in others:
        uneven = f"column {first} has {lengths[first]:,} values, but column {name} has {lengths[name]:,}"
        require(lengths[name] == lengths[first], f"{uneven}; all columns need as many values.", DataError)
    require(lengths[first] > 0, "the table has no rows.", DataError)
    return columns


def _require_values(name: str, values: Any) -> None:
    one = isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable)
    several = not one and getattr(values, "ndim", 1) == 1
    found = reprlib.repr(values)
    require(several, f"column {name} must be a list or an array with a value for each row, not {found}.", DataError)


def _fields(values: Any, spelling: Spelling, names: bool) -> Fields:
    """A column. Arrays of numbers are taken as they are, everything else as the texts that a CSV file would have."""
    array = np.asarray(values)
    if not names and array.ndim == 1 and (array.dtype.kind in "iu" or array.dtype == np.float64):
        column = GrowingColumn(spelling, names=False)
        column.reserve(len(array))
        if column.add_numbers(array.astype(np.float64), 0):
            return column.fields(len(array))
    exact = array if array.ndim == 1 and array.dtype.kind == "f" else values  # a list of float32 would be float64
    return Fields.read([_text(value) for value in exact], spelling, names)


def _text(value: Any) -> str:
    return "" if is_gap(value) else str(value)


def is_gap(value: Any) -> bool:
    """Whether a value stands for a missing one: None, NaN, or a marker that cannot be compared, such as pandas.NA."""
    try:
        return value is None or bool(value != value)
    except TypeError:
        return True
    except ValueError:  # an array, which is no single value
        return False
