"""A data set from a pandas DataFrame: the samples are those of the CSV file that it would be written to.

pandas is not imported here: whoever has a DataFrame has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedadc.data.dataset import Dataset
from fedadc.data.loaders.rows import fields_of
from fedadc.data.loaders.table import Table, chosen_columns, data_like, data_of, table_like, with_test
from fedadc.data.rules import TableRules
from fedadc.data.split import DEFAULT_TEST_SHARE, HeldOut
from fedadc.errors import DataError, require


def from_frame(
    frame: Any,
    label: str | Sequence[str],
    client: str | None = None,
    test: Any = None,
    validation: float | None = None,
    drop: Sequence[str] | None = None,
    scale: str | Mapping[str, Sequence[float]] | None = "standard",
    categories: Sequence[str] | None = None,
    missing: Sequence[str | float] | None = None,
    merge_names: bool = False,
    task: str | None = None,
    seed: int = 0,
    name: str = "frame",
) -> Dataset:
    """A data set from a DataFrame, or from columns by name, with a label column and, optionally, a client column.

    `test` is another DataFrame or the share to hold out (default: 20 %; 0: none). The other arguments are those of
    `from_csv`, and the samples are those of the CSV file. The index is left out.
    """
    share = test if isinstance(test, int | float) else None
    held_out = HeldOut(DEFAULT_TEST_SHARE if test is None else share or None, validation, seed)
    require(not isinstance(drop, str), f"drop must be a list of columns, not {drop!r:.60}.")
    rules = TableRules.of(scale, categories, missing, merge_names, task, label)
    classes = "" if rules.targets else label if isinstance(label, str) else label[0]  # the name of their column
    names = [column for column in (classes, client) if column]
    columns = fields_of(frame, rules.spelling, names)
    used = chosen_columns(list(columns), name, classes, client, drop or (), rules)
    kept = {column: columns[column] for column in columns if column in {*names, *rules.targets, *used}}
    data = data_of(Table(name, _bytes_of(kept), kept, classes, client, used, rules), name, held_out)
    if test is None or share is not None:
        return data
    return with_test(data, frame_like(test, data, "test"))


def frame_like(frame: Any, like: Dataset, name: str) -> Dataset:
    """A data set from a DataFrame, or from columns by name, with the columns and classes of an existing table."""
    encoding = like.encoding
    if encoding is None:
        raise DataError(f"{name} has columns by name, but the model was not trained on a table; give a file or folder.")
    names = [column for column in (encoding.label, encoding.client) if column and column not in encoding.targets]
    columns = fields_of(frame, encoding.spelling, names)
    return data_like(table_like(columns, name, _bytes_of(columns), encoding), name, like)


def _bytes_of(columns: Mapping[str, Any]) -> int:
    """The size of columns in memory, to which their features are in proportion."""
    return sum(fields.numbers.nbytes + sum(map(len, fields.words)) for fields in columns.values())
