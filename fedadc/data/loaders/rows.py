"""The features of new rows of a table, which need no labels: from a CSV file, a DataFrame or columns by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedadc.data.encoding import TableEncoding
from fedadc.data.loaders.csv import read_columns
from fedadc.data.summaries import Fields
from fedadc.errors import DataError, require


def features_of(rows: Path | Any, encoding: TableEncoding, where: str = "") -> Tensor:
    """The features of rows, encoded as those of training; further columns of the table are left out.

    `where` names the table in messages.
    """
    where = where or (str(rows) if isinstance(rows, Path) else "the table")
    columns = read_columns(rows) if isinstance(rows, Path) else texts_of(rows)
    missing = [column.name for column in encoding.columns if column.name not in columns]
    require(not missing, f"{where} lacks the column {', '.join(missing)[:200]}.", DataError)
    fields = {column.name: Fields.read(columns[column.name]) for column in encoding.columns}
    return torch.from_numpy(encoding.features(fields, where))


def texts_of(table: Any) -> Mapping[str, Sequence[str]]:
    """The columns of a DataFrame, or of a mapping from names to values, as they would be written to a CSV file."""
    names = [*table] if isinstance(table, Mapping) or hasattr(table, "columns") else []
    require(bool(names), f"rows must be a path, a DataFrame or columns by name, not {type(table).__name__}.")
    columns = {str(name): [_text(value) for value in table[name]] for name in names}
    lengths = {len(values) for values in columns.values()}
    require(len(columns) == len(names), "two columns have the same name.", DataError)
    require(len(lengths) == 1 and lengths != {0}, "all columns need as many values, and at least one.", DataError)
    return columns


def _text(value: Any) -> str:
    return "" if value is None or value != value else str(value)
