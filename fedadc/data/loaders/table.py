"""A table in memory, from a file or a DataFrame, and the data set that its rows become.

Rows are held out first. The encoding (`fedadc.data.encoding`) is then fit on the training rows alone, from a summary of
each client's own ones, and applied to all rows. So a site that has only its own rows gets the same samples as a
simulation that has everybody's. The notes of the data set describe the encoding of every column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

import numpy as np
import torch

from fedadc.data.columns import Fields
from fedadc.data.dataset import Array, Clients, Dataset, Samples
from fedadc.data.encoding import TableEncoding
from fedadc.data.fitting import (
    fit_columns,
    fit_labels,
    fit_targets,
    notes_about,
    of_features,
    refuse_stray_texts,
    standard_constants,
)
from fedadc.data.labels import class_numbers, missing_name, numbers_to_predict
from fedadc.data.loaders.limits import require_proportionate
from fedadc.data.remarks import about_columns, about_test_rows
from fedadc.data.rules import TableRules
from fedadc.data.split import HeldOut, SplitRows
from fedadc.data.summaries import TableSummary, merged_summary, summaries
from fedadc.data.targets import notes_about_targets
from fedadc.errors import DataError, require, unknown

DEFAULT_RULES = TableRules()


@dataclass(frozen=True)
class Table:
    """The columns of a table, and which of them are the label, the client and features."""

    source: str  # names the table in messages
    size: int  # bytes on disk or in memory
    columns: dict[str, Fields] = field(repr=False)
    label: str
    client: str | None
    used: tuple[str, ...]  # the columns that become features
    rules: TableRules = DEFAULT_RULES
    first_row: int = 2  # the number of the first row in messages

    @cached_property
    def labels(self) -> Fields:
        """The label of every row; none is missing. Numbers to predict are all of one class."""
        if self.rules.targets:
            rows = len(next(iter(self.columns.values())))
            return Fields.of_texts(np.zeros(rows, dtype=np.int32), ("",))
        labels = self._names(self.label, "label")
        return (
            self._merged(labels, f"{self.source}, column {self.label}") if self.rules.spelling.merge_names else labels
        )

    @cached_property
    def clients(self) -> Fields | None:
        """The client of every row, in a natural federation; the names are sorted."""
        if self.client is None or self.client not in self.columns:
            return None
        found = self._names(self.client, "client")
        return self._merged(found, f"{self.source}, column {self.client}")

    @property
    def owners(self) -> Array | None:
        """The name of the client of every row."""
        return None if self.clients is None else np.array(self.clients.words)[self.clients.codes]

    def _names(self, column: str, what: str) -> Fields:
        """A column of names. Long ones are refused: a NumPy array of them would be large."""
        found = self.columns[column]
        missing = found.codes < 0
        if missing.any():
            raise DataError(missing_name(self.source, int(missing.argmax()) + self.first_row, column, what))
        longest = max(range(len(found.words)), key=lambda code: len(found.words[code]))
        length = len(found.words[longest])
        row = int((found.codes == longest).argmax()) + self.first_row
        what_is_long = f"{self.source}, row {row}: a {what} of {length} characters"
        require_proportionate(4 * len(found) * length, self.size, what_is_long, f"use short {what} names")
        return found

    def _merged(self, names: Fields, where: str) -> Fields:
        """Names with one name for those that are to be merged, sorted; an error if some look alike and are not."""
        one = self.rules.spelling.one_name(names.words, where)
        words = sorted({*one.values()})
        position = {word: code for code, word in enumerate(words)}
        codes = np.array([position[one[word]] for word in names.words], dtype=np.int32)
        return Fields.of_texts(codes[names.codes], words)

    def split(self, held_out: HeldOut) -> SplitRows:
        """The rows of every split. A client holds out shares of its labels; how they are numbered does not matter."""
        if self.clients is not None:
            return held_out.rows(self.labels.codes, self.clients.codes, self.clients.words)
        if self.rules.targets:
            return held_out.rows(self.labels.codes)
        classes, _ = fit_labels(self.labels.words, len(self.labels), self.label, self.rules, self.locate)
        spelling = self.rules.spelling
        return held_out.rows(class_numbers(self.labels, classes, spelling, self.label, self.source, self.first_row))

    def summaries(self, rows: Array, as_text: Collection[str] = (), sums: bool | None = None) -> list[TableSummary]:
        """The summaries of all clients, each made of its own rows among these; without clients, one of all rows.

        `sums`: whether they have the sums of numbers; None: if the scale asks clients for them. Those of numbers to
        predict are always there.
        """
        return summaries(*self._summarized(rows, as_text, sums))

    def summary(self, rows: Array, as_text: Collection[str] = ()) -> TableSummary:
        """The summaries of all clients, merged."""
        return merged_summary(*self._summarized(rows, as_text, None))

    def _summarized(
        self, rows: Array, as_text: Collection[str], sums: bool | None
    ) -> tuple[dict[str, Fields], Fields, list[Array], set[str], set[str]]:
        summed = self.used if (self.rules.sums if sums is None else sums) else ()
        columns = {name: self.columns[name] for name in (*self.used, *self.rules.targets)}
        as_text = {*as_text, *self.rules.categories}
        return columns, self.labels, self._shares(rows), as_text, {*summed, *self.rules.targets}

    def _shares(self, rows: Array) -> list[Array]:
        if self.clients is None:
            return [rows]
        owner = self.clients.codes[rows]
        shares = Clients.from_owner(owner, len(self.clients.words))
        return [rows[shares[k]] for k in range(len(shares)) if len(shares[k])]

    def names_of(self, rows: Array) -> list[str]:
        """The clients that have some of these rows."""
        assert self.clients is not None
        return [self.clients.words[code] for code in np.unique(self.clients.codes[rows]).tolist()]

    def locate(self, column: str, texts: Collection[str]) -> tuple[str, str]:
        """The first row in which a column has one of these texts, and the text."""
        found = self.columns[column].as_texts()
        wanted = np.array([word in set(texts) for word in found.words] + [False])[found.codes]
        if not wanted.any():
            return "a row of another client", min(texts)
        row = int(wanted.argmax())
        return f"{self.source}, row {row + self.first_row}", found.text(row)

    def samples(self, encoding: TableEncoding, keep: bool = True) -> Samples:
        """All rows, encoded. Inputs are stored column by column; `take` returns rows that are stored one by one.

        Without `keep`, the columns of the table are dropped once they are encoded, which saves their memory.
        """
        widest = max(encoding.columns, key=lambda column: column.width)
        rows = len(self.labels)
        require_proportionate(
            4 * rows * encoding.width,
            self.size,
            f"{self.source}: {encoding.width} features of {rows} rows, {widest.width} of them for column "
            f"{widest.name},",
            f"leave out such columns with drop: [{widest.name}]",
        )
        clients = self.clients
        if encoding.targets:
            y = numbers_to_predict(self.columns.__getitem__, encoding.targets, self.source, self.first_row)
        else:
            known = encoding.classes, encoding.spelling
            y = class_numbers(self.labels, *known, self.label, self.source, self.first_row)
        give = self.columns.__getitem__ if keep else self.columns.pop
        x = encoding.features(give, self.source, self.first_row, clients)
        return Samples(torch.from_numpy(x), torch.from_numpy(y))


def chosen_columns(
    header: Sequence[str], source: str, label: str, client: str | None, drop: Sequence[str], rules: TableRules
) -> tuple[str, ...]:
    """The columns that become features; an error if a named column is not in the header."""
    labels = rules.targets or (label,)
    _require_consistent(labels, client, drop, rules)
    for name in filter(None, [*labels, client, *drop, *rules.columns]):
        if name not in header and len(header) == 1:
            raise DataError(f"{source} has only one column, {[*header]}; separate columns by commas.")
        if name not in header:
            raise unknown(f"{source}: column", name, header)
    used = tuple(name for name in header if name not in {*labels, client, *drop})
    require(bool(used), f"{source} has no feature column left besides the label, client and dropped columns.")
    return used


def _require_consistent(labels: Sequence[str], client: str | None, drop: Sequence[str], rules: TableRules) -> None:
    """Refuse settings that contradict each other: a column has one use."""
    numbers = [name for name in rules.constants if name not in rules.targets]  # labels are scaled too, if numbers
    uses = {
        "label": labels, "client": [client] if client else [], "drop": drop, "categories": rules.categories,
        "scale": numbers,
    }  # fmt: skip
    for first, second in combinations(uses, 2):
        both = sorted({*uses[first]} & {*uses[second]})
        require(not both, f"{first} and {second} both name the column {both[0] if both else ''}; it has one use.")


def fit_encoding(summary: TableSummary, table: Table) -> TableEncoding:
    """The encoding that all clients use, from their merged summary."""
    rules = table.rules
    if rules.targets:
        columns = fit_columns(of_features(summary, rules), rules)
        return TableEncoding(columns, "", table.client, (), False, rules.spelling, targets=rules.targets)
    classes, integers = fit_labels(summary.labels, summary.rows, table.label, table.rules, table.locate)
    columns = fit_columns(summary, table.rules)
    return TableEncoding(columns, table.label, table.client, classes, integers, table.rules.spelling)


def own_scales(summary: TableSummary, encoding: TableEncoding) -> tuple[tuple[float, float], ...]:
    """The constants of a client, from its own summary, where every client has its own."""
    own = [column.name for column in encoding.columns if column.by_client]
    return tuple(standard_constants(summary.columns[name]) for name in own)


def data_of(table: Table, name: str, held_out: HeldOut, fit_on: Collection[str] | None = None) -> Dataset:
    """The data set that a table becomes. The columns of the table are used up.

    `fit_on`: the clients whose rows settle the encoding; None: all.
    """
    rows = table.split(held_out)
    fitted = rows.train
    if fit_on is not None and table.owners is not None:
        fitted = fitted[np.isin(table.owners[fitted], list(fit_on))]
        require(len(fitted) > 0, f"{table.source} has no training rows of {', '.join(fit_on)[:60]}.", DataError)
    summary = table.summary(fitted)
    refuse_stray_texts(summary, table.rules, table.locate)
    if summary.mixed:
        summary = table.summary(fitted, summary.mixed)
    encoding = fit_encoding(summary, table)
    if table.rules.scale == "per-client":
        require(table.client is not None, "scale: per-client needs data that names its clients: set client.")
        everybody = table.summaries(rows.train, summary.mixed, sums=True)
        own = (own_scales(one, encoding) for one in everybody)
        encoding = replace(encoding, scales=dict(zip(table.names_of(rows.train), own, strict=True)))
    targets, remarks = (
        fit_targets(summary, table.rules, table.locate),
        about_columns(table.columns, fitted, summary, table.used),
    )
    notes = (*notes_about(encoding, summary), *notes_about_targets(targets), *remarks)
    samples = table.samples(encoding, keep=False)
    data = Dataset(
        name, samples, encoding.classes, owners=table.owners, notes=notes, encoding=encoding, targets=targets
    )  # fmt: skip
    data = held_out.divide(data, rows)
    return replace(data, notes=(*data.notes, *about_test_rows(data)))


def with_test(data: Dataset, further: Dataset) -> Dataset:
    """A data set with the samples of another one as its test samples."""
    data = replace(data, test=further.train, test_owners=further.owners)
    return replace(data, notes=(*data.notes, *about_test_rows(data)))


def data_like(table: Table, name: str, like: Dataset) -> Dataset:
    """The data set that a further table becomes, with the columns and classes of an existing one."""
    assert like.encoding is not None
    samples = table.samples(like.encoding, keep=False)
    samples = samples.take(np.arange(len(samples)))
    return Dataset(
        name, samples, like.classes, None, None, like.normalization, table.owners, encoding=like.encoding,
        targets=like.targets,
    )  # fmt: skip


def table_like(
    columns: Mapping[str, Fields], source: str, size: int, encoding: TableEncoding, first_row: int = 2
) -> Table:
    """A further table with the columns of an encoding."""
    used = tuple(column.name for column in encoding.columns)
    missing = [name for name in (*(encoding.targets or [encoding.label]), *used) if name not in columns]
    require(not missing, f"{source} lacks the column {', '.join(missing)[:200]}.", DataError)
    rules = TableRules(spelling=encoding.spelling, targets=encoding.targets)
    return Table(source, size, dict(columns), encoding.label, encoding.client, used, rules, first_row)
