"""How one column of a table becomes features.

- A number becomes (value - center) / spread. By default the constants are the mean and the standard deviation over all
  clients' training rows; they may be given, be every client's own, or be left out.
- A missing number becomes the center, and an extra indicator column is set to 1 if training has missing numbers.
- A text column becomes one column per category. A missing text is a category of its own. A category that does not
  occur in training is all zeros. Columns of numbers that are listed as categories are treated alike.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np

from fedadc.data.columns import Array, Fields
from fedadc.data.spelling import as_yaml, no_number
from fedadc.data.summaries import ColumnSummary
from fedadc.errors import DataError, require

MISSING_CATEGORY = "(missing)"
Constants = tuple[float, float]  # center and spread


@dataclass(frozen=True)
class Column:
    """How one column is encoded as features."""

    name: str
    categories: tuple[str, ...] | None  # None: a numeric column
    has_missing: bool
    center: float = 0.0
    spread: float = 1.0
    scaled: bool = False
    by_client: bool = False  # every client has its own center and spread

    def __post_init__(self) -> None:
        wrong = f"column {self.name!r:.40} has constants or categories that cannot be"
        require(isfinite(self.center) and 0 < self.spread < inf, f"{wrong}.", DataError)
        distinct = self.categories is None or len(set(self.categories)) == len(self.categories) > 0
        require(distinct, f"{wrong}.", DataError)

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 + self.has_missing if self.categories is None else len(self.categories)

    def encode(
        self, fields: Fields, out: Array, where: str, first_row: int = 2, constants: tuple[Any, Any] | None = None
    ) -> None:
        """Write the features of these fields to `out`, float32 [width, rows].

        `constants`: center and spread, if not the column's.
        """
        if self.categories is not None:
            self._one_hot(fields, out)
            return
        center, spread = constants or (self.center, self.spread)
        stray = np.flatnonzero(fields.codes >= 0).tolist() if fields.words else []
        if stray:
            row = stray[0]
            text = fields.text(row)
            raise DataError(
                f"{where}, row {row + first_row}, column {self.name}: {reprlib.repr(text)} is {no_number(text)}."
            )
        scaled = out[0]
        with np.errstate(over="ignore"):
            np.divide(fields.numbers - center, spread, out=scaled, casting="same_kind")  # rounded once, at the end
        finite = np.isfinite(scaled)
        if not finite.all():
            gaps = np.isnan(fields.numbers)
            large = np.flatnonzero(~finite & ~gaps)
            if len(large):
                row = int(large[0])
                text = reprlib.repr(fields.text(row))
                raise DataError(
                    f"{where}, row {row + first_row}, column {self.name}: {text} is too large when it is scaled."
                )
            scaled[gaps] = 0  # the center
        if self.has_missing:
            out[1] = np.isnan(fields.numbers)

    def _one_hot(self, fields: Fields, out: Array) -> None:
        assert self.categories is not None
        code = {category: i for i, category in enumerate(self.categories)}
        fields = fields.as_texts()
        absent = code.get(MISSING_CATEGORY, -1)  # the last one: a missing field has the code -1
        codes = np.array([*(code.get(word, -1) for word in fields.words), absent])[fields.codes]
        known = np.flatnonzero(codes >= 0)
        out[:] = 0
        out[codes[known], known] = 1

    def describe(self, summary: ColumnSummary) -> str:
        """One line about the encoding, for the notes of the data set."""
        if self.categories is not None:
            marked = ", missing values are one" if MISSING_CATEGORY in self.categories else ""
            return f"{as_yaml(self.name)}: text, {len(self.categories)} categories{marked}"
        text = f"{as_yaml(self.name)}: number"
        if summary.low is not None and summary.high is not None:
            text += f", {summary.low:g} to {summary.high:g}"
        scaled = f", scaled by ({self.center:.12g}, {self.spread:.12g})" if self.scaled else ", not scaled"
        text += ", scaled by every client's own mean and standard deviation" if self.by_client else scaled
        return text + (", missing values marked" if self.has_missing else "")
