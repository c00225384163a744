"""The columns of a table in memory: numbers as float64, texts as positions in a list of the different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedadc.data.spelling import DEFAULT_SPELLING, MAX_MAGNITUDE, Spelling, clean, number, number_name, spelled

Array = np.ndarray
MOST_SPELLINGS = 10_000  # of texts other than names that are remembered
MOST_MARKS = 4  # different spellings of missing values in one column that are remembered


@dataclass(frozen=True)
class Fields:
    """The fields of one column: each is a number, a text or missing."""

    numbers: Array  # float64; NaN where a field is not a number
    codes: Array  # int32: the position of a text in `words`; -1 where a field is not a text
    words: tuple[str, ...] = ()  # the different texts, without blanks around them

    def __len__(self) -> int:
        return len(self.numbers)

    @staticmethod
    def of_numbers(values: Array) -> Fields:
        """A column without texts. NaN is missing."""
        return Fields(values, np.broadcast_to(np.int32(-1), len(values)))

    @staticmethod
    def of_texts(codes: Array, words: Sequence[str]) -> Fields:
        """A column without numbers."""
        return Fields(np.broadcast_to(np.nan, len(codes)), codes, tuple(words))

    @staticmethod
    def read(texts: Sequence[str], spelling: Spelling = DEFAULT_SPELLING, names: bool = False) -> Fields:
        """The fields with these texts. As `names`, all that are not missing are texts, and spelled in one way."""
        column = GrowingColumn(spelling, names)
        column.reserve(len(texts))
        column.add_texts(texts, 0)
        return column.fields(len(texts))

    @property
    def missing(self) -> Array:
        """Which fields are neither a number nor a text."""
        return np.asarray(np.isnan(self.numbers) & (self.codes < 0))

    def text(self, row: int) -> str:
        """A field, as it is spelled."""
        code, value = int(self.codes[row]), float(self.numbers[row])
        return self.words[code] if code >= 0 else number_name(value) if value == value else ""

    def as_texts(self) -> Fields:
        """The column with every number as a text."""
        rows = np.flatnonzero(~np.isnan(self.numbers))
        if not len(rows):
            return self
        values, position = np.unique(self.numbers[rows], return_inverse=True)
        codes = np.array(self.codes)
        codes[rows] = len(self.words) + position
        return Fields.of_texts(codes, (*self.words, *map(number_name, values.tolist())))


class GrowingColumn:
    """A column while it is read, block by block."""

    def __init__(self, spelling: Spelling, names: bool) -> None:
        self.spelling = spelling
        self.names = names
        self.words: dict[str, int] = {}
        self.spellings: dict[str, int] = {}  # the codes of texts as they are written
        self.marks: set[str] = set()  # how missing values are written, if they are not empty
        self.capacity = 0
        self.numbers: Array | None = None  # None: no number so far
        self.codes: Array | None = None  # None: no text so far

    def reserve(self, rows: int) -> None:
        """Make room for so many rows."""
        self.capacity = rows
        for array in (self.numbers, self.codes):
            if array is not None:
                array.resize(rows, refcheck=False)

    def add_numbers(self, values: Array, start: int) -> bool:
        """Add a block of numbers, NaN for missing ones; False if one of them is too large to be a number."""
        low, high = np.fmin.reduce(values, initial=0), np.fmax.reduce(values, initial=0)
        if high > MAX_MAGNITUDE or low < -MAX_MAGNITUDE:
            return False
        if self.numbers is None:
            self.numbers = np.empty(self.capacity)
            self.numbers[:start] = np.nan
        stored = self.numbers[start : start + len(values)]
        stored[:] = values
        for value in self.spelling.missing_numbers:
            stored[stored == value] = np.nan
        if self.codes is not None:
            self.codes[start : start + len(values)] = -1
        return True

    def add_texts(self, texts: Sequence[str], start: int) -> None:
        """Add a block of fields as they are written."""
        if self.names:
            self._add_codes(self._codes_of_names(texts), start)
            return
        if self.words and self._add_known(texts, start):
            return
        plain = _plain_numbers(texts)
        if plain is not None and self.add_numbers(plain, start):
            return
        distinct = list(dict.fromkeys(texts))
        position = dict(zip(distinct, range(len(distinct)), strict=True))
        self._add_fields(distinct, np.fromiter(map(position.__getitem__, texts), np.int64, len(texts)), start)

    def add_coded(self, distinct: Sequence[str], rows: Array, start: int) -> None:
        """Add a block of fields that are given as positions in a list of the different ones, in order of appearance."""
        if self.names:
            self._add_codes(self._codes_of_names(distinct)[rows], start)
        else:
            self._add_fields(distinct, rows, start)

    def _add_fields(self, distinct: Sequence[str], rows: Array, start: int) -> None:
        read = [self._read(text) for text in distinct]
        values = np.array([value for value, _ in read])[rows]
        codes = np.array([code for _, code in read], dtype=np.int32)[rows]
        if self.numbers is not None or not np.isnan(values).all():
            fits = self.add_numbers(values, start)
            assert fits, "`number` returns no larger ones"
        if self.codes is not None or (codes >= 0).any():
            self._add_codes(codes, start)

    def _add_known(self, texts: Sequence[str], start: int) -> bool:
        """Add a block of texts that were all seen before; False if some were not, or are numbers."""
        try:
            codes = np.fromiter(map(self.spellings.__getitem__, texts), np.int32, len(texts))
        except KeyError:
            return False
        if self.numbers is not None:
            self.numbers[start : start + len(texts)] = np.nan
        self._add_codes(codes, start)
        return True

    def _read(self, text: str) -> tuple[float, int]:
        """A field as a number or as the code of a text."""
        written, text = text, clean(text)
        value = number(text)
        if value == value:
            return np.nan if value in self.spelling.missing_numbers else value, -1
        if not self.spelling.is_missing(text):
            return value, self._remember(written, self.words.setdefault(text, len(self.words)))
        if written and len(self.marks) < MOST_MARKS and "\n" not in written and "," not in written:
            self.marks.add(written)
        return value, self._remember(written, -1)

    def _remember(self, written: str, code: int) -> int:
        if len(self.spellings) < MOST_SPELLINGS:
            self.spellings[written] = code
        return code

    def _codes_of_names(self, texts: Sequence[str]) -> Array:
        codes = self.spellings
        try:
            return np.fromiter(map(codes.__getitem__, texts), np.int32, len(texts))
        except KeyError:  # texts that were not seen before
            for text in dict.fromkeys(texts):
                if text not in codes:
                    name = spelled(text)
                    missing = self.spelling.is_missing(name)
                    codes[text] = -1 if missing else self.words.setdefault(name, len(self.words))
            return np.fromiter(map(codes.__getitem__, texts), np.int32, len(texts))

    def _add_codes(self, codes: Array, start: int) -> None:
        if self.codes is None:
            self.codes = np.empty(self.capacity, dtype=np.int32)
            self.codes[:start] = -1
        self.codes[start : start + len(codes)] = codes

    def fields(self, rows: int) -> Fields:
        """The column, once all rows are read."""
        self.reserve(rows)
        numbers = np.broadcast_to(np.nan, rows) if self.numbers is None else self.numbers
        codes = np.broadcast_to(np.int32(-1), rows) if self.codes is None else self.codes
        return Fields(numbers, codes, tuple(self.words))


def _plain_numbers(texts: Sequence[str]) -> Array | None:
    """The fields as numbers; None if one of them is not a number, or may stand for something else."""
    try:
        values = np.fromiter(map(float, texts), np.float64, len(texts))
    except ValueError:
        return None
    return values if np.isfinite(values).all() and not any("_" in text for text in texts) else None
