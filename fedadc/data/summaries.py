"""What clients tell about the training rows of their tables, so that all of them encode their rows alike.

A summary is made from the rows of one client. The server merges the summaries in the order of the clients, and what the
columns become is decided from the merged summary (`fedadc.data.encoding`), never from pooled rows. Data without clients
is the case of one summary. Summaries consist of plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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
    everybody = _ClientRows.of(clients)
    of_columns = {
        name: everybody.of_column(fields.as_texts() if name in as_text else fields, name in sums).split()
        for name, fields in columns.items()
    }
    words = everybody.words(labels)
    return [
        TableSummary(size, {name: next(found) for name, found in of_columns.items()}, own)
        for size, own in zip(everybody.sizes.tolist(), words, strict=True)
    ]


def merged_summary(
    columns: Mapping[str, Fields],
    labels: Fields,
    clients: Sequence[Array],
    as_text: Collection[str] = (),
    sums: Collection[str] = (),
) -> TableSummary:
    """The merger of what `summaries` gives, without a value for every client."""
    everybody = _ClientRows.of(clients)
    found = {
        name: everybody.of_column(fields.as_texts() if name in as_text else fields, name in sums).merged()
        for name, fields in columns.items()
    }
    return TableSummary(len(everybody.rows), found, everybody.all_words(labels))


@dataclass(frozen=True)
class _ColumnOfClients:
    """One column of all clients."""

    numbers: Array  # per client
    texts: Array
    missing: Array
    low: Array  # NaN: no number
    high: Array
    totals: Array | None  # Σx
    squares: Array | None  # Σ(x - mean)²
    words: Callable[[], list[tuple[str, ...]]]  # of every client
    all_words: Callable[[], tuple[str, ...]]

    def split(self) -> Iterator[ColumnSummary]:
        """The summary of every client."""
        values = (array.tolist() for array in (self.numbers, self.texts, self.missing, self.low, self.high))
        for many, texts, missing, low, high, words, sums in zip(*values, self.words(), self._sums(), strict=True):
            least, most = (low, high) if many else (None, None)
            yield ColumnSummary(many, texts, missing, words, least, most, sums)

    def merged(self) -> ColumnSummary:
        """The summary of all clients together."""
        many, texts, missing = (int(array.sum()) for array in (self.numbers, self.texts, self.missing))
        low, high = (float(np.fmin.reduce(self.low)), float(np.fmax.reduce(self.high))) if many else (None, None)
        several = self._sums()
        sums = None if several[0] is None else _added([own for own in several if own is not None])
        return ColumnSummary(many, texts, missing, self.all_words(), low, high, sums)

    def _sums(self) -> list[tuple[int, float, float] | None]:
        if self.totals is None or self.squares is None:
            return [None] * len(self.numbers)
        return list(zip(self.numbers.tolist(), self.totals.tolist(), self.squares.tolist(), strict=True))


@dataclass(frozen=True)
class _ClientRows:
    """The training rows of all clients: those of the first, then those of the second, and so on."""

    rows: Array
    sizes: Array

    @staticmethod
    def of(clients: Sequence[Array]) -> _ClientRows:
        sizes = np.array([len(own) for own in clients])
        require(sizes.min() > 0, "every client needs a training row.")
        return _ClientRows(np.concatenate(clients), sizes)

    def of_column(self, fields: Fields, sums: bool) -> _ColumnOfClients:
        starts = np.cumsum(self.sizes) - self.sizes
        values = fields.numbers.take(self.rows)
        gaps = np.isnan(values)
        numbers = self.sizes.copy()
        if gaps.any():
            numbers -= np.add.reduceat(gaps, starts, dtype=np.int64)
        texts = np.zeros_like(numbers)
        if fields.words:
            texts = np.add.reduceat(fields.codes[self.rows] >= 0, starts, dtype=np.int64)
        low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
        totals, squares = self._sums(values, gaps, numbers, starts) if sums else (None, None)
        return _ColumnOfClients(
            numbers, texts, self.sizes - numbers - texts, low, high, totals, squares,
            partial(self.words, fields), partial(self.all_words, fields),
        )  # fmt: skip

    def _sums(self, values: Array, gaps: Array, numbers: Array, starts: Array) -> tuple[Array, Array]:
        """Σx and Σ(x - mean)² of every client. `reduceat` adds the values of a client in an order of its own."""
        any_gaps = bool(gaps.any())
        present = np.where(gaps, 0.0, values) if any_gaps else values
        totals = np.add.reduceat(present, starts)
        centered = present - np.repeat(totals / np.maximum(numbers, 1), self.sizes)
        np.square(centered, out=centered)
        if any_gaps:
            centered[gaps] = 0
        return totals, np.add.reduceat(centered, starts)

    def words(self, fields: Fields) -> list[tuple[str, ...]]:
        """The different texts of every client, sorted."""
        many = len(fields.words)
        if not many:
            return [()] * len(self.sizes)
        owned: list[list[str]] = [[] for _ in self.sizes]
        codes = fields.codes[self.rows]
        cells = np.repeat(np.arange(len(self.sizes)), self.sizes)[codes >= 0] * many + codes[codes >= 0]
        for cell in np.unique(cells).tolist():
            owned[cell // many].append(fields.words[cell % many])
        return [tuple(sorted(words)) for words in owned]

    def all_words(self, fields: Fields) -> tuple[str, ...]:
        """The different texts of all clients, sorted."""
        if not fields.words:
            return ()
        found = np.bincount(fields.codes[self.rows] + 1, minlength=len(fields.words) + 1)[1:]
        return tuple(sorted(fields.words[code] for code in np.flatnonzero(found).tolist()))


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
