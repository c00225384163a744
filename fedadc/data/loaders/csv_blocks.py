"""Parse a block of a CSV file that has no quotes, by pyarrow or NumPy; what these cannot parse is left to the caller.

Blocks may be refused that could be parsed, but what is parsed is what Python's csv module and `float` give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from fedadc.data.columns import Array, GrowingColumn
from fedadc.data.spelling import Spelling

LONGEST_LINE = 131_072  # bytes; a longer line may have a field beyond the limit of the csv module
PARSED_BY_A_THREAD = 1 << 22  # bytes
MOST_PARSED = 2_000  # columns; of wider tables, the types would take longer than the parsing
# what is around a field; twice for neighbors, of which the first one takes the comma
AROUND = ((b",", b","), (b",", b","), (b"\n", b","), (b",", b"\n"), (b",", b"\r"))
Columns = Mapping[str, GrowingColumn]  # those that are wanted


def parsed(
    block: bytes, header: Sequence[str], columns: Columns, start: int, spelling: Spelling, fast: bool = True
) -> int | None:
    """Add the rows of a block to the columns, and return how many there are; None: it cannot be parsed.

    Then the columns have to be overwritten from `start` on. `fast`: whether loading pyarrow is worth its time.
    """
    if b'"' in block or b"\0" in block or len(header) > MOST_PARSED or block.isspace() or _has_long_line(block):
        return None
    if b"\r" in block and block.count(b"\r") > block.count(b"\r\n"):  # alone, it ends a line for the csv module
        return None
    rows = None if not fast or _arrow() is None else _by_arrow(block, columns, header, start)
    return _by_numpy(block, columns, header, start, spelling) if rows is None else rows


def _has_long_line(block: bytes) -> bool:
    start = 0
    while len(block) - start > LONGEST_LINE:
        start = block.rfind(b"\n", start, start + LONGEST_LINE) + 1
        if not start:
            return True
    return False


@cache
def _arrow() -> Any:
    try:
        from pyarrow import csv
    except ImportError:
        return None
    return csv


def _is_number(column: GrowingColumn) -> bool:
    return not column.names and not column.words


def _by_arrow(block: bytes, columns: Columns, header: Sequence[str], start: int) -> int | None:
    import pyarrow as pa

    csv, marks = _arrow(), {mark for column in columns.values() for mark in column.marks}
    text = pa.dictionary(pa.int32(), pa.string())
    kinds = {name: pa.float64() if _is_number(column) else text for name, column in columns.items()}
    try:
        table = csv.read_csv(
            pa.BufferReader(block),
            csv.ReadOptions(column_names=list(header), block_size=PARSED_BY_A_THREAD),
            csv.ParseOptions(quote_char=False, double_quote=False),
            csv.ConvertOptions(
                column_types=kinds, include_columns=list(columns), null_values=["", *marks], strings_can_be_null=False
            ),
        )
    except (pa.ArrowInvalid, MemoryError):
        return None
    first = start
    for batch in table.to_batches():
        for name, column in columns.items():
            fields = batch.column(name)
            if kinds[name] is text:
                column.add_coded(fields.dictionary.to_pylist(), _array(fields.indices, np.int32), first)
            elif not _add_numbers(column, fields, first):
                return None
        first += batch.num_rows
    return first - start


def _add_numbers(column: GrowingColumn, fields: Any, start: int) -> bool:
    """Add numbers of pyarrow; False if one is such as nan or inf, which the csv module tells apart."""
    values = _array(fields, np.float64)
    return np.count_nonzero(np.isnan(values)) <= fields.null_count and column.add_numbers(values, start)


def _array(fields: Any, kind: type[np.generic]) -> Array:
    """An array of pyarrow, with NaN where it is null; its own method would import pandas."""
    valid, values = fields.buffers()
    part = slice(fields.offset, fields.offset + len(fields))
    found = np.frombuffer(values, kind)[part]
    if fields.null_count:
        bits = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[part]
        found = np.where(bits, found, np.nan)
    return found


def _by_numpy(block: bytes, columns: Columns, header: Sequence[str], start: int, spelling: Spelling) -> int | None:
    replaces = spelling.is_missing("nan")
    kinds = [
        (f"{k}", ("f8" if _is_number(columns[name]) else "O") if name in columns else "U1")
        for k, name in enumerate(header)
    ]
    marks = {mark for column in columns.values() for mark in column.marks}
    try:
        filled = _with_nan(block, marks) if replaces else block
        rows = np.loadtxt(
            filled.decode().split("\n"), np.dtype(kinds, align=True), comments=None, delimiter=",", ndmin=1
        )
    except ValueError:
        return None
    gaps = False
    for k, (name, (_, kind)) in enumerate(zip(header, kinds, strict=True)):
        if kind == "f8":
            values = np.ascontiguousarray(rows[f"{k}"])
            gaps = gaps or bool(np.isnan(values).any())
            if not columns[name].add_numbers(values, start):
                return None
        elif name in columns:
            columns[name].add_texts(rows[f"{k}"].tolist(), start)
    return None if gaps and (not replaces or _has_signed_nan(block)) else len(rows)


def _with_nan(block: bytes, marks: set[str]) -> bytes:
    """A block with "nan" in empty fields and for these spellings of missing numbers."""
    if marks:
        block = b"\n" + block
    for mark in (mark.encode() for mark in marks):
        for before, after in AROUND:
            block = block.replace(before + mark + after, before + b"nan" + after)
    found = np.frombuffer(block, np.uint8)
    comma, line = found == ord(","), found == ord("\n")
    ends = comma | line | (found == ord("\r")) if b"\r" in block else comma | line
    places = (np.flatnonzero((comma[:-1] & ends[1:]) | (line[:-1] & comma[1:])) + 1).tolist()
    starts = [0, *([0] if block.startswith(b",") else []), *places, len(block)]
    return b"nan".join([block[first:last] for first, last in pairwise(starts)]) if len(starts) > 2 else block


def _has_signed_nan(block: bytes) -> bool:
    """Whether a block may have a field such as -nan, which NumPy takes for a missing number."""
    found = np.frombuffer(block, np.uint8)
    signs = (found[:-1] == ord("-")) | (found[:-1] == ord("+"))
    return bool((signs & ((found[1:] | 32) == ord("n"))).any())
