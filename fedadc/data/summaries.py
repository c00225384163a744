"""What clients tell about the training rows of their tables, so that all of them encode their rows alike.

A summary is made from the rows of one client. The server merges the summaries in the order of the clients, and what the
columns become is decided from the merged summary (`fedadc.data.encoding`), never from pooled rows. Data without clients
is the case of one summary. Summaries consist of plain values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedadc.data.columns import Array, Fields
from fedadc.errors import require


@dataclass(frozen=True)
class ColumnSummary:
    """One column of a client's training rows."""

    numbers: int = 0  # rows with a number
    texts: int = 0  # rows with a text
    missing: int = 0  # rows with neither
    words: tuple[str, ...] = ()  # the different texts, sorted
    low: float | None = None  # the range of the numbers
    high: float | None = None
    sums: tuple[int, float, float] | None = None  # n, Σx and Σ(x - mean)², if standard scaling asks for them


@dataclass(frozen=True)
class TableSummary:
    """The training rows of a client, or of several."""

    rows: int
    columns: Mapping[str, ColumnSummary]
    labels: tuple[str, ...]  # the different labels, sorted

    @property
    def mixed(self) -> frozenset[str]:
        """Columns of texts that also have numbers. There, numbers are categories too: summarize them `as_text`."""
        return frozenset(name for name, column in self.columns.items() if column.texts and column.numbers)


def summaries(
    columns: Mapping[str, Fields],
    labels: Fields,
    clients: Sequence[Array],
    as_text: Collection[str] = (),
    sums: Collection[str] = (),
) -> list[TableSummary]:
    """The summary of every client, given the numbers of its training rows.

    `as_text`: columns without numbers; `sums`: columns whose sums are told. A site calls this with its own table and
    one client, and gets what a simulation has for that client.
    """
    sizes = np.array([len(own) for own in clients])
    require(sizes.min() > 0, "every client needs a training row.")
    rows = np.concatenate(clients)
    of_columns = {
        name: _of_column(fields.as_texts() if name in as_text else fields, rows, sizes, name in sums)
        for name, fields in columns.items()
    }
    words = _words(labels, rows, sizes)
    return [
        TableSummary(size, {name: next(found) for name, found in of_columns.items()}, next(words))
        for size in sizes.tolist()
    ]


def _of_column(fields: Fields, rows: Array, sizes: Array, sums: bool) -> Iterator[ColumnSummary]:
    """A summary for every client; `rows` are those of the first client, then those of the second, and so on."""
    starts = np.cumsum(sizes) - sizes
    values, texts = fields.numbers[rows], fields.codes[rows] >= 0
    gaps = np.isnan(values)
    missing = np.add.reduceat(gaps & ~texts, starts, dtype=np.int64).tolist()
    numbers = np.add.reduceat(~gaps, starts, dtype=np.int64)
    low, high = np.fmin.reduceat(values, starts).tolist(), np.fmax.reduceat(values, starts).tolist()
    several = _sums(values, gaps, numbers, starts, sizes) if sums else None
    words = _words(fields, rows, sizes)
    for k, (many, lacking) in enumerate(zip(numbers.tolist(), missing, strict=True)):
        least, most = (low[k], high[k]) if many else (None, None)
        own = (many, several[0][k], several[1][k]) if several is not None else None
        yield ColumnSummary(many, int(sizes[k]) - many - lacking, lacking, next(words), least, most, own)


def _sums(values: Array, gaps: Array, numbers: Array, starts: Array, sizes: Array) -> tuple[list[float], list[float]]:
    """Σx and Σ(x - mean)² of every client. `reduceat` adds the values of a client in an order of its own."""
    present = np.where(gaps, 0.0, values) if gaps.any() else values
    totals = np.add.reduceat(present, starts)
    centered = present - np.repeat(totals / np.maximum(numbers, 1), sizes)
    np.square(centered, out=centered)
    centered[gaps] = 0
    return totals.tolist(), np.add.reduceat(centered, starts).tolist()


def _words(fields: Fields, rows: Array, sizes: Array) -> Iterator[tuple[str, ...]]:
    """The different texts of every client, sorted."""
    many = len(fields.words)
    owned: list[list[str]] = [[] for _ in sizes]
    if many:
        codes = fields.codes[rows]
        cells = np.repeat(np.arange(len(sizes)), sizes)[codes >= 0] * many + codes[codes >= 0]
        for cell in np.unique(cells).tolist():
            owned[cell // many].append(fields.words[cell % many])
    return (tuple(sorted(words)) for words in owned)


def merge(summaries: Sequence[TableSummary]) -> TableSummary:
    """The summary of all these clients' rows together."""
    names = list(summaries[0].columns)
    require(all(list(summary.columns) == names for summary in summaries), "all clients' tables need the same columns.")
    columns = {name: _merged([summary.columns[name] for summary in summaries]) for name in names}
    return TableSummary(sum(s.rows for s in summaries), columns, _union(s.labels for s in summaries))


def _merged(columns: Sequence[ColumnSummary]) -> ColumnSummary:
    several = [column.sums for column in columns]
    return ColumnSummary(
        sum(column.numbers for column in columns),
        sum(column.texts for column in columns),
        sum(column.missing for column in columns),
        _union(column.words for column in columns),
        min((column.low for column in columns if column.low is not None), default=None),
        max((column.high for column in columns if column.high is not None), default=None),
        None if None in several else _added([own for own in several if own is not None]),
    )


def _added(sums: Sequence[tuple[int, float, float]]) -> tuple[int, float, float]:
    """The sums of several clients together, in their order, without the loss of digits that Σx² would bring."""
    n, total, squares = sums[0]
    for many, own, own_squares in sums[1:]:
        if many and n:
            squares += own_squares + (own / many - total / n) ** 2 * (n * many / (n + many))
        else:
            squares += own_squares
        n, total = n + many, total + own
    return n, total, squares


def _union(words: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({word for some in words for word in some}))
