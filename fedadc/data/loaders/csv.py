"""Load a CSV table with a label column and, for a natural federation, a client column."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from fedadc.data.columns import Fields
from fedadc.data.dataset import Dataset
from fedadc.data.encoding import TableEncoding
from fedadc.data.loaders.arguments import file_or_share, path_of
from fedadc.data.loaders.csv_file import read_columns
from fedadc.data.loaders.table import Table, chosen_columns, data_like, data_of, table_like, with_test
from fedadc.data.rules import TableRules
from fedadc.data.split import DEFAULT_TEST_SHARE, HeldOut
from fedadc.errors import require

NOTHING = HeldOut()


def csv_table(
    path: Path,
    label: str | list[str],
    client: str | None = None,
    test: Path | None = None,
    drop: list[str] | None = None,
    scale: str | dict[str, list[float]] | None = "standard",
    categories: list[str] | None = None,
    missing: list[str | float] | None = None,
    merge_names: bool = False,
    held_out: HeldOut = NOTHING,
    fit_on: Collection[str] | None = None,  # clients whose rows settle the encoding; None: all
    task: str | None = None,  # what the labels are; None: what they look like
) -> Dataset:
    """your own table: a CSV file with a label column and, optionally, a client column"""
    rules = TableRules.of(scale, categories, missing, merge_names, task, label)
    return _table_data(path, label, client, test, drop or (), rules, held_out, fit_on)


def from_csv(
    path: str | Path,
    label: str | Sequence[str],
    client: str | None = None,
    test: str | Path | float | None = None,
    validation: float | None = None,
    drop: Sequence[str] | None = None,
    scale: str | Mapping[str, Sequence[float]] | None = "standard",
    categories: Sequence[str] | None = None,
    missing: Sequence[str | float] | None = None,
    merge_names: bool = False,
    task: str | None = None,
    seed: int = 0,
) -> Dataset:
    """A data set from a CSV file with a label column and, for a natural federation, a client column.

    `test` is a file or the share to hold out (default: 20 %; 0: none); `validation` is a share of the rest. Nothing
    about held out rows enters the encoding of the columns, so the shares cannot be held out later. `scale` is
    "standard", "per-client", "none", or the center and the spread of number columns, {"age": (40, 12)}; `categories`
    are columns of numbers to be treated as texts, and `missing` replaces the list of spellings of missing values. With
    `task="regression"`, the label is a number to predict, or several ones: a list of columns.
    """
    file, share = file_or_share(test)
    held_out = HeldOut(DEFAULT_TEST_SHARE if test is None else share, validation, seed)
    require(not isinstance(drop, str), f"drop must be a list of columns, not {drop!r:.60}.")
    rules = TableRules.of(scale, categories, missing, merge_names, task, label)
    return _table_data(path_of(path), label, client, file, list(drop or ()), rules, held_out, None)


def _table_data(
    path: Path,
    label: str | Sequence[str],
    client: str | None,
    test: Path | None,
    drop: Sequence[str],
    rules: TableRules,
    held_out: HeldOut,
    fit_on: Collection[str] | None,
) -> Dataset:
    data = data_of(read_table(path, label, client, drop, rules), path.name, held_out, fit_on)
    if test is None:
        return data
    return with_test(data, csv_like(test, data))


def csv_like(path: Path, like: Dataset) -> Dataset:
    """A data set from a CSV file, with the columns and classes of an existing one."""
    encoding = like.encoding
    assert encoding is not None
    columns, _ = read_encoded(path, encoding)
    return data_like(table_like(columns, str(path), path.stat().st_size, encoding), path.name, like)


def read_encoded(path: Path, encoding: TableEncoding, label: bool = True) -> tuple[dict[str, Fields], list[str]]:
    """The columns of a file that an encoding has, as far as the file has them, and the names of the others.

    Without `label`, only those that the features depend on.
    """
    names = encoding.names
    used = encoding.inputs | names | {*encoding.targets} if label else encoding.inputs
    others: list[str] = []

    def choose(header: Sequence[str]) -> tuple[Collection[str], Collection[str]]:
        others.extend(name for name in header if name not in used)
        return names, others

    return read_columns(path, encoding.spelling, choose), others


def read_table(
    path: Path,
    label: str | Sequence[str],
    client: str | None,
    drop: Sequence[str],
    rules: TableRules,
    has_client: bool = True,
) -> Table:
    """The table in a file, with these columns; without `has_client`, the file may lack that of the client."""
    used: tuple[str, ...] = ()
    name = "" if rules.targets else label if isinstance(label, str) else label[0]  # of the column of classes

    def choose(header: Sequence[str]) -> tuple[Collection[str], Collection[str]]:
        nonlocal used
        own = client if has_client or client in header else None
        used = chosen_columns(header, str(path), name, own, drop, rules)
        names = [column for column in (name, own) if column]
        return names, [column for column in header if column not in {*names, *used, *rules.targets}]

    columns = read_columns(path, rules.spelling, choose)
    return Table(str(path), path.stat().st_size, columns, name, client, used, rules)
