"""Read a CSV file in blocks of lines into compact columns.

A block of plain numbers and texts is parsed by pyarrow, if it is installed, or by NumPy. A block that these cannot
parse (quotes, a missing value of a spelling that was not seen before, an error) is read by the `csv` module, which
decides what is wrong. All three read numbers as Python's `float` does, to the last bit.
"""

from __future__ import annotations

import csv
import io
import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from fedadc.data.columns import Fields, GrowingColumn
from fedadc.data.loaders.csv_blocks import parsed
from fedadc.data.spelling import Spelling
from fedadc.errors import DataError, kind_of_failure, one_line, require, require_file

MAX_COLUMNS = 100_000
PARSED_AT_ONCE = 1 << 23  # bytes
LARGE = 1 << 24  # bytes; for smaller files, loading pyarrow would take longer than reading them
PARSED_FIRST = 1 << 15  # the first block shows which columns have texts, which takes more time
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of bytes, at the beginning of some files
# the columns of texts (labels and clients) and those to leave out, given the header
Choose = Callable[[Sequence[str]], tuple[Collection[str], Collection[str]]]


def read_columns(path: Path, spelling: Spelling, choose: Choose) -> dict[str, Fields]:
    """The columns of a file, by name."""
    require_file(path, "data")
    try:
        with path.open("rb") as stream:
            reader = _Reader(path, stream)
            require(any(reader.header), f"{path} needs a header and at least one row.", DataError)
            names, dropped = choose(reader.header)
            return reader.columns(spelling, names, dropped)
    except csv.Error as error:
        needed = "columns are separated by commas, and quotes are closed"
        raise DataError(f"{path} is not a CSV file in UTF-8, whose {needed} ({one_line(error)}).") from error
    except (OSError, UnicodeDecodeError) as error:
        raise kind_of_failure(error)(f"{path} is not a CSV file in UTF-8 ({one_line(error)}).") from error


class _Reader:
    """The state of reading a file."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self.stream = stream
        if stream.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            stream.seek(0)
        self.pending: list[str] = []  # lines that the csv module has not read yet, the next one last
        self.lines = 0  # that were read before
        self.rows = 0
        self.capacity = 0  # rows for which there is room
        self.growing: dict[str, GrowingColumn] = {}
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
            if not self.pending:
                self.pending = _lines_of(self.stream.readline())
            if not self.pending:
                return
            line = self.pending.pop()
            self.lines += 1
            if "\0" in line:
                raise DataError(f"{self.path}, line {self.lines} contains a NUL byte; a CSV file must be UTF-8 text.")
            yield line

    def columns(self, spelling: Spelling, names: Collection[str], dropped: Collection[str]) -> dict[str, Fields]:
        """All further rows, by column."""
        self.growing = {name: GrowingColumn(spelling, name in names) for name in self.header if name not in dropped}
        rest, read, size = "".join(reversed(self.pending)).encode(), 0, self.path.stat().st_size
        while block := rest + self.stream.read(PARSED_AT_ONCE if read else PARSED_FIRST):
            block, rest = block + self.stream.readline(), b""
            many = block.count(b"\n") + (block.count(b"\r") if b"\r" in block else 0) + 1  # at least those of its rows
            read += len(block)
            self._reserve(many, size / read)
            rows = parsed(block, self.header, self.growing, self.rows, spelling, size >= LARGE)
            if rows is None:
                self._read(block)
            else:
                self.lines, self.rows = self.lines + many - 1, self.rows + rows
        require(self.rows > 0, f"{self.path} needs a header and at least one row.", DataError)
        return {name: column.fields(self.rows) for name, column in self.growing.items()}

    def _reserve(self, rows: int, remaining: float) -> None:
        """Make room for a block, and for what the rest of the file will probably have."""
        if self.rows + rows > self.capacity:
            self.capacity = int((self.rows + rows) * max(1.0, 1.02 * remaining)) + 1
            for column in self.growing.values():
                column.reserve(self.capacity)

    def _read(self, block: bytes) -> None:
        """Read a block with the csv module, and the rest of a row that goes on beyond it."""
        self.pending = _lines_of(block)
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
        self._reserve(len(rows), 1.0)
        for position, name in enumerate(self.header):
            if name in self.growing:
                self.growing[name].add_texts([row[position] for row in rows], self.rows)
        self.rows += len(rows)


def _lines_of(block: bytes) -> list[str]:
    """The lines of a block, the last one first."""
    return list(io.StringIO(block.decode(), newline=""))[::-1]
