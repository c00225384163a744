"""Read a CSV file in blocks of lines into compact columns.

A block of plain numbers and texts is parsed by NumPy. A block that NumPy cannot parse, with quotes, missing values of a
spelling that was not seen before or an error, is read by the `csv` module, which gives the same values and decides what
is wrong. Both read numbers as Python's `float` does.
"""

from __future__ import annotations

import csv
import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TextIO

import numpy as np

from fedadc.data.columns import Fields, GrowingColumn
from fedadc.data.spelling import Spelling
from fedadc.errors import DataError, kind_of_failure, one_line, require, require_file

MAX_COLUMNS = 100_000
PARSED_AT_ONCE = 1 << 21  # characters that are parsed at once
PARSED_FIRST = 1 << 15  # the first block shows which columns have texts, which takes more time
LONGEST_LINE = 131_072  # characters; a longer line may have a field beyond the limit of the csv module
MOST_PARSED = 2_000  # columns; of wider tables, NumPy's types would take longer than the parsing
# the columns of texts (labels and clients) and those to leave out, given the header
Choose = Callable[[Sequence[str]], tuple[Collection[str], Collection[str]]]


def read_columns(path: Path, spelling: Spelling, choose: Choose) -> dict[str, Fields]:
    """The columns of a file, by name."""
    require_file(path, "data")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = _Reader(path, stream)
            require(any(reader.header), f"{path} needs a header and at least one row.", DataError)
            names, dropped = choose(reader.header)
            return reader.columns(spelling, names, dropped)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise kind_of_failure(error)(f"{path} is not a CSV file in UTF-8 ({one_line(error)}).") from error


class _Reader:
    """The state of reading a file."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self.path = path
        self.stream = stream
        self.pending: list[str] = []  # lines of the present block that the csv module has not read yet
        self.lines = 0  # that were read before
        self.rows = 0
        self.capacity = 0  # rows for which there is room
        self.growing: dict[str, GrowingColumn] = {}
        self.replaces = False  # whether "nan" is a missing value, as it is to NumPy
        self.header = self._header()

    def _header(self) -> list[str]:
        rows = csv.reader(self._lines(), strict=True)
        header = [name.strip() for name in next((row for row in rows if row), [])]
        wide = f"{self.path} has {len(header)} columns; at most {MAX_COLUMNS} are allowed."
        require(len(header) <= MAX_COLUMNS, wide, DataError)
        twice = [name for name, count in Counter(header).items() if count > 1]
        same = f"{self.path}: two columns have the same name, {reprlib.repr(twice[:1])}."
        require(not twice, same, DataError)
        return header

    def _lines(self) -> Iterator[str]:
        """The lines of the block, then further ones, if a field goes on beyond the block."""
        while True:
            line = self.pending.pop() if self.pending else self.stream.readline()
            if not line:
                return
            self.lines += 1
            if "\0" in line:
                raise DataError(f"{self.path}, line {self.lines} contains a NUL byte; a CSV file must be UTF-8 text.")
            yield line

    def columns(self, spelling: Spelling, names: Collection[str], dropped: Collection[str]) -> dict[str, Fields]:
        """All further rows, by column."""
        self.growing = {name: GrowingColumn(spelling, name in names) for name in self.header if name not in dropped}
        self.replaces = spelling.is_missing("nan")
        size, read = self.path.stat().st_size, 0
        while lines := self.stream.readlines(PARSED_AT_ONCE if read else PARSED_FIRST):
            text = "".join(lines)
            read += len(text)
            self._reserve(len(lines), size / read)
            if not self._parse(lines, text):
                self._read(lines)
        empty = f"{self.path} needs a header and at least one row."
        require(self.rows > 0, empty, DataError)
        return {name: column.fields(self.rows) for name, column in self.growing.items()}

    def _reserve(self, rows: int, remaining: float) -> None:
        """Make room for a block, and for what the rest of the file will probably have."""
        if self.rows + rows > self.capacity:
            self.capacity = int((self.rows + rows) * max(1.0, 1.02 * remaining)) + 1
            for column in self.growing.values():
                column.reserve(self.capacity)

    def _read(self, lines: list[str]) -> None:
        """Read a block with the csv module, and the rest of a row that goes on beyond it."""
        self.pending = lines[::-1]
        rows: list[list[str]] = []
        reader = csv.reader(self._lines(), strict=True)
        while self.pending:
            row = next(reader, [])
            if row and len(row) != len(self.header):
                number = self.rows + len(rows) + 2
                counts = f"{len(row)} fields, but the header has {len(self.header)}"
                raise DataError(f"{self.path}, row {number} has {counts}.")
            if row:
                rows.append(row)
        for position, name in enumerate(self.header):
            if name in self.growing:
                self.growing[name].add_texts([row[position] for row in rows], self.rows)
        self.rows += len(rows)

    def _parse(self, lines: list[str], text: str) -> bool:
        """Let NumPy parse a block; False if it has something that only the csv module reads."""
        simple = '"' not in text and "\0" not in text and len(self.header) <= MOST_PARSED
        if not simple or max(map(len, lines)) > LONGEST_LINE or text.isspace():
            return False
        kinds = [(f"{k}", self._kind(name)) for k, name in enumerate(self.header)]
        marks = {mark for column in self.growing.values() for mark in column.marks}
        try:
            rows = _with_nan(lines, text, marks) if self.replaces else lines
            found = np.loadtxt(rows, np.dtype(kinds, align=True), comments=None, delimiter=",", ndmin=1)
        except ValueError:
            return False
        gaps = False
        for k, (name, (_, kind)) in enumerate(zip(self.header, kinds, strict=True)):
            if kind == "f8":
                values = np.ascontiguousarray(found[f"{k}"])
                gaps = gaps or bool(np.isnan(values).any())
                if not self.growing[name].add_numbers(values, self.rows):
                    return False
            elif name in self.growing:
                self.growing[name].add_texts(found[f"{k}"].tolist(), self.rows)
        if gaps and (not self.replaces or _has_signed_nan(text)):
            return False  # the block is read again, and overwritten
        self.lines += len(lines)
        self.rows += len(found)
        return True

    def _kind(self, name: str) -> str:
        """The type in which NumPy gives a column: numbers, texts, or nothing but the first characters."""
        if name not in self.growing:
            return "U1"
        column = self.growing[name]
        return "O" if column.names or column.words else "f8"


def _with_nan(lines: list[str], text: str, marks: Collection[str]) -> list[str]:
    """The lines of a block, with "nan" in empty fields and for these spellings of missing numbers."""
    for mark in marks:
        text = f"\n{text}"
        for before, after in ((",", ","), (",", ","), ("\n", ","), (",", "\n"), (",", "\r")):  # neighbors take two
            text = text.replace(f"{before}{mark}{after}", f"{before}nan{after}")
    encoded = text.encode()
    block = np.frombuffer(encoded, np.uint8)
    comma, line = block == ord(","), block == ord("\n")
    ends = comma | line | (block == ord("\r")) if "\r" in text else comma | line
    places = np.flatnonzero((comma[:-1] & ends[1:]) | (line[:-1] & comma[1:])) + 1
    if not len(places) and not marks and not text.startswith(","):
        return lines
    starts = [0, *([0] if text.startswith(",") else []), *places.tolist(), len(encoded)]
    return b"nan".join([encoded[start:end] for start, end in pairwise(starts)]).decode().split("\n")


def _has_signed_nan(text: str) -> bool:
    """Whether a block may have a field such as -nan, which NumPy takes for a missing number."""
    block = np.frombuffer(text.encode(), np.uint8)
    signs = (block[:-1] == ord("-")) | (block[:-1] == ord("+"))
    return bool((signs & ((block[1:] | 32) == ord("n"))).any())
