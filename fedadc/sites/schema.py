"""What the sites of a federation tell about their data before training, and what they agree on from it.

A site sends a summary of its own data. The server merges the summaries in the order of the clients into a schema, which
is frozen for the whole run: shapes, classes, constants and, for tables, the encoding of every column. A site whose data
does not fit is refused by its name. No row leaves a site.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedadc.data.dataset import Normalization
from fedadc.data.encoding import TableEncoding
from fedadc.data.fitting import fit_columns, fit_labels, fit_targets, notes_about, of_features, refuse_stray_texts
from fedadc.data.rules import TableRules
from fedadc.data.schema import DataSchema
from fedadc.data.summaries import ColumnSummary, TableSummary, merge
from fedadc.data.targets import Sums, scaled_targets
from fedadc.errors import DataError, require
from fedadc.tasks import Target

COMMON = {  # what the arrays of all sites have alike, in words
    "shape": "inputs of shape", "dtype": "inputs of type", "normalization": "constants", "targets": "targets",
}  # fmt: skip
UNKNOWN = 0  # rows of a site that does not tell how many it has
FEW_CATEGORIES = 20  # of a column; more than these must occur twice on average, or they may be names


@dataclass(frozen=True)
class ArraySummary:
    """The arrays of a site: what all sites must have alike, and its own classes."""

    shape: tuple[int, ...]  # of one input
    dtype: str
    normalization: Normalization
    classes: tuple[str, ...]
    integers: bool  # whether the labels are numbers, which are sorted as such
    targets: tuple[Target, ...] = ()  # the numbers to predict
    sums: tuple[Sums, ...] = ()  # of every target without constants: n, Σy and Σ(y - mean)²


@dataclass(frozen=True)
class SiteSummary:
    """What a site tells about its data. It has either arrays or a table."""

    client: str  # its name
    rows: int  # of training
    arrays: ArraySummary | None = None
    table: TableSummary | None = None


@dataclass(frozen=True)
class SiteAnswer:
    """What a site tells when it has agreed to take part."""

    sizes: dict[str, int]  # samples of every split that it tells
    label_counts: tuple[int, ...] | None  # of its training samples; None: not asked for
    data: str  # checksum of its samples
    agreement: str  # fingerprint of what it will train with


def merged_schema(summaries: Sequence[SiteSummary], rules: TableRules) -> DataSchema:
    """The schema for these sites, in the order of the clients; a site that does not fit the first one is refused."""
    _require_alike(summaries)
    if summaries[0].table is None:
        return _schema_of_arrays([summary.arrays for summary in summaries if summary.arrays is not None])
    return _schema_of_tables([summary.table for summary in summaries if summary.table is not None], rules, summaries)


def permitted(summary: SiteSummary, allows: Collection[str]) -> SiteSummary:
    """The part of a summary that a site may tell; an error if no table could be encoded with it."""
    rows = summary.rows if "samples" in allows else UNKNOWN
    if summary.table is None:
        require(
            summary.arrays is None or not summary.arrays.sums or "sums" in allows,
            f"site {summary.client} does not tell the sums of its labels, by which they are scaled; let it allow sums.",
        )
        return replace(summary, rows=rows)
    columns = summary.table.columns
    texts = [name for name, column in columns.items() if column.words]
    require(
        not texts or "categories" in allows,
        f"site {summary.client} does not tell the categories of {', '.join(texts)[:80]}, which their encoding needs; "
        "data.drop leaves columns out, or the site can allow it.",
    )
    for name in texts if "many-categories" not in allows else ():
        found = len(columns[name].words)
        require(
            found <= FEW_CATEGORIES or 2 * found <= columns[name].texts,
            f"site {summary.client} does not tell the {found} different texts of column {name}, which "
            "may be names of persons; data.drop leaves the column out, or the site can allow many-categories.",
        )
    summed = [name for name, column in columns.items() if column.sums is not None and column.numbers]
    require(
        not summed or "sums" in allows,
        f"site {summary.client} does not tell the sums of {', '.join(summed)[:80]}, which scale: standard needs; set "
        "data.scale to per-client, none or given constants, or let the site allow sums.",
    )
    if "ranges" not in allows:
        columns = {name: replace(column, low=None, high=None) for name, column in columns.items()}
    if "samples" not in allows:
        columns = {name: _without_counts(column) for name, column in columns.items()}
    return replace(summary, rows=rows, table=replace(summary.table, rows=rows, columns=columns))


def _without_counts(column: ColumnSummary) -> ColumnSummary:
    """Whether a column has numbers, texts and gaps, not how many."""
    return replace(column, numbers=min(1, column.numbers), texts=min(1, column.texts), missing=min(1, column.missing))


def mixed_columns(summaries: Sequence[SiteSummary]) -> frozenset[str]:
    """Columns of texts in which some site has numbers: there, numbers are categories too, and are asked for again."""
    _require_alike(summaries)
    tables = [summary.table for summary in summaries if summary.table is not None]
    return merge(tables).mixed if tables else frozenset()


def _require_alike(summaries: Sequence[SiteSummary]) -> None:
    first = summaries[0]
    for other in summaries[1:]:
        difference = difference_of(first, other)
        require(not difference, f"site {other.client} does not fit site {first.client}: {difference}.", DataError)


def difference_of(one: SiteSummary, other: SiteSummary) -> str:
    """Why the data of two sites cannot be trained with together; empty: it can."""
    if (one.table is None) != (other.table is None):
        return "one has a table, the other has arrays"
    if one.table is not None and other.table is not None:
        mine, theirs = list(one.table.columns), list(other.table.columns)
        missing, further = [n for n in mine if n not in theirs], [n for n in theirs if n not in mine]
        if missing or further:
            parts = [
                f"{verb} {', '.join(names)}" for verb, names in (("it lacks", missing), ("it has", further)) if names
            ]
            return f"its columns differ: {'; '.join(parts)}"
        return "" if mine == theirs else f"its columns are in another order ({', '.join(theirs)})"
    assert one.arrays is not None and other.arrays is not None
    for field, words in COMMON.items():
        mine_value, theirs_value = getattr(one.arrays, field), getattr(other.arrays, field)
        if mine_value != theirs_value:
            return f"it has {words} {theirs_value}, not {mine_value}"
    same_kind = one.arrays.integers == other.arrays.integers
    return "" if same_kind else "the labels of one are numbers, those of the other are names"


def _schema_of_arrays(arrays: Sequence[ArraySummary]) -> DataSchema:
    first, classes = arrays[0], arrays[0].classes
    if any(own.classes != classes for own in arrays):
        union = {name for own in arrays for name in own.classes}
        classes = tuple(sorted(union, key=int) if first.integers else sorted(union))
    targets = first.targets
    if not all(target.scaled for target in targets):
        complete = all(len(own.sums) == len(targets) for own in arrays)
        require(complete, "a site does not tell the sums of its labels, by which they are scaled.", DataError)
        targets = scaled_targets(targets, [own.sums for own in arrays])
    return DataSchema(first.shape, first.dtype, classes, first.normalization, targets=targets)


def _schema_of_tables(
    tables: Sequence[TableSummary], rules: TableRules, summaries: Sequence[SiteSummary]
) -> DataSchema:
    summary = merge(tables)

    def locate(column: str, texts: Any) -> tuple[str, str]:
        """A site that has one of these texts in a column, and the text."""
        for site, table in zip(summaries, tables, strict=True):
            own = table.columns[column].words if column in table.columns else table.labels
            found = [text for text in own if text in set(texts)]
            if found:
                return f"site {site.client}", found[0]
        return "a site", min(texts)

    refuse_stray_texts(summary, rules, locate)
    if rules.targets:
        columns, targets = fit_columns(of_features(summary, rules), rules), fit_targets(summary, rules, locate)
        encoding = TableEncoding(columns, "", None, (), False, rules.spelling, targets=rules.targets)
        return DataSchema((encoding.width,), "float32", (), Normalization(), encoding, targets)
    rules.spelling.one_name(summary.labels, "the label column of the sites")
    classes, integers = fit_labels(summary.labels, _rows(tables), "label", rules, locate)
    encoding = TableEncoding(fit_columns(summary, rules), "", None, classes, integers, rules.spelling)
    return DataSchema((encoding.width,), "float32", classes, Normalization(), encoding)


def _rows(tables: Sequence[TableSummary]) -> int:
    """The training rows of all sites; 0: not all tell them."""
    sizes = [table.rows for table in tables]
    return 0 if UNKNOWN in sizes else sum(sizes)


def notes_about_tables(schema: DataSchema, summaries: Sequence[SiteSummary]) -> tuple[str, ...]:
    """What becomes of the columns of tables, as far as the sites tell it."""
    tables = [summary.table for summary in summaries if summary.table is not None]
    return notes_about(schema.encoding, merge(tables)) if schema.encoding is not None else ()


def lonely_classes(summaries: Sequence[SiteSummary]) -> dict[str, str]:
    """Classes that a single site has, which may be a mistake there, and the site."""
    owners: dict[str, list[str]] = {}
    for summary in summaries:
        own = summary.table.labels if summary.table is not None else summary.arrays.classes if summary.arrays else ()
        for label in own:
            owners.setdefault(label, []).append(summary.client)
    return {label: sites[0] for label, sites in owners.items() if len(sites) == 1 < len(summaries)}


def with_names(schema: DataSchema, label: str, client: str | None) -> DataSchema:
    """The schema of tables whose label and client columns have these names."""
    if schema.encoding is None or schema.targets:
        return schema
    return replace(schema, encoding=replace(schema.encoding, label=label, client=client))
