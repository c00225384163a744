"""What clients tell about the training rows of their tables, so that all of them encode their rows alike.

A summary is made from the rows of one client. The server merges the summaries in the order of the clients, and what the
columns become is decided from the merged summary (`fedadc.data.encoding`), never from pooled rows. Data without clients
is the case of one summary. Summaries consist of plain values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedadc.errors import require

Array = np.ndarray
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
MAX_MAGNITUDE = 1e30  # larger values would overflow in float32 arithmetic


def is_missing(text: str) -> bool:
    return text.strip().lower() in MISSING


def number(text: str) -> float:
    """The number that a field contains; NaN if it contains none, or one that is too large."""
    try:
        value = float(text)
    except ValueError:
        return np.nan
    return value if abs(value) <= MAX_MAGNITUDE else np.nan


@dataclass(frozen=True)
class Fields:
    """The fields of one column, read one by one: each is a number, missing or a text."""

    texts: Sequence[str]  # as they are in the file
    numbers: Array  # float64; NaN where a field is not a number
    missing: Array  # bool

    @staticmethod
    def read(texts: Sequence[str]) -> Fields:
        value = {text: number(text) for text in set(texts)}
        numbers = np.fromiter(map(value.__getitem__, texts), dtype=np.float64, count=len(texts))
        missing = np.isnan(numbers)
        rows = np.flatnonzero(missing)
        empty = {text for text, n in value.items() if n != n and is_missing(text)}
        missing[rows] = [texts[row] in empty for row in rows.tolist()]
        return Fields(texts, numbers, missing)


@dataclass(frozen=True)
class ColumnSummary:
    """One column of a client's training rows."""

    numbers: int = 0  # rows with a number
    texts: int = 0  # rows with a text
    missing: int = 0  # rows with neither
    words: tuple[str, ...] = ()  # the different texts, sorted
    low: float | None = None  # the range of the numbers
    high: float | None = None


@dataclass(frozen=True)
class TableSummary:
    """The training rows of a client, or of several."""

    rows: int
    columns: Mapping[str, ColumnSummary]
    labels: tuple[str, ...]  # the different labels as they are written, sorted

    @property
    def mixed(self) -> frozenset[str]:
        """Columns of texts that also have numbers. There, numbers are categories too: summarize them `as_text`."""
        return frozenset(name for name, column in self.columns.items() if column.texts and column.numbers)


def summaries(
    columns: Mapping[str, Fields], labels: Sequence[str], clients: Sequence[Array], as_text: Collection[str] = ()
) -> list[TableSummary]:
    """The summary of every client, given the numbers of its training rows; `as_text`: columns without numbers.

    A site calls this with its own table and one client, and gets what a simulation has for that client.
    """
    rows, sizes = np.concatenate(clients), [len(own) for own in clients]
    require(min(sizes) > 0, "every client needs a training row.")
    by_column = {name: _of_column(fields, rows, sizes, name in as_text) for name, fields in columns.items()}
    return [
        TableSummary(
            sizes[k],
            {name: found[k] for name, found in by_column.items()},
            tuple(sorted({labels[row] for row in own.tolist()})),
        )
        for k, own in enumerate(clients)
    ]


def _of_column(fields: Fields, rows: Array, sizes: Sequence[int], as_text: bool) -> list[ColumnSummary]:
    """A summary for every client; `rows` are those of the first client, then those of the second, and so on."""
    starts = np.cumsum([0, *sizes[:-1]])
    values, missing = fields.numbers[rows], fields.missing[rows]
    is_number = np.zeros(len(rows), dtype=bool) if as_text else ~np.isnan(values)
    is_text = ~is_number & ~missing
    counts = [np.add.reduceat(mask, starts, dtype=np.int64).tolist() for mask in (is_number, is_text, missing)]
    low = np.minimum.reduceat(np.where(is_number, values, np.inf), starts).tolist()
    high = np.maximum.reduceat(np.where(is_number, values, -np.inf), starts).tolist()
    words = iter([fields.texts[row].strip() for row in rows[is_text].tolist()])
    found = []
    for numbers, texts, gaps, least, most in zip(*counts, low, high, strict=True):
        own = tuple(sorted({next(words) for _ in range(texts)})) if texts else ()
        found.append(ColumnSummary(numbers, texts, gaps, own, *((least, most) if numbers else (None, None))))
    return found


def merge(summaries: Sequence[TableSummary]) -> TableSummary:
    """The summary of all these clients' rows together."""
    names = list(summaries[0].columns)
    require(all(list(summary.columns) == names for summary in summaries), "all clients' tables need the same columns.")
    columns = {name: _merged([summary.columns[name] for summary in summaries]) for name in names}
    return TableSummary(sum(s.rows for s in summaries), columns, _union(s.labels for s in summaries))


def _merged(columns: Sequence[ColumnSummary]) -> ColumnSummary:
    return ColumnSummary(
        sum(column.numbers for column in columns),
        sum(column.texts for column in columns),
        sum(column.missing for column in columns),
        _union(column.words for column in columns),
        min((column.low for column in columns if column.low is not None), default=None),
        max((column.high for column in columns if column.high is not None), default=None),
    )


def _union(words: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({word for some in words for word in some}))
