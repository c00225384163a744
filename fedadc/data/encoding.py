"""How the rows of a table become features: decided once, from a merged summary, and the same everywhere.

`fedadc.data.features` is about one column, `fedadc.data.labels` about classes and numbers to predict.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fedadc.data.columns import Array, Fields
from fedadc.data.features import Column, Constants
from fedadc.data.rules import are_constants
from fedadc.data.spelling import DEFAULT_SPELLING, Spelling, likeness
from fedadc.errors import DataError, require

NAMED_CLIENTS = 5  # in a message


@dataclass(frozen=True)
class TableEncoding:
    """The features and classes of a table's rows."""

    columns: tuple[Column, ...]
    label: str  # the name of the label column
    client: str | None  # the name of the client column
    classes: tuple[str, ...]
    integers: bool  # whether the labels are integers, which are sorted as such
    spelling: Spelling = DEFAULT_SPELLING
    scales: Mapping[str, tuple[Constants, ...]] = field(default_factory=dict)  # by client, of its own columns
    targets: tuple[str, ...] = ()  # in a regression, the names of the label columns

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        require(len(set(names)) == len(names), "two columns of an encoding have the same name.", DataError)
        own = sum(column.by_client for column in self.columns)
        known = all(len(several) == own and all(map(are_constants, several)) for several in self.scales.values())
        require(known, "the constants of a client are not those of the columns.", DataError)

    @property
    def width(self) -> int:
        """The number of features."""
        return sum(column.width for column in self.columns)

    @property
    def inputs(self) -> set[str]:
        """The columns that the features of a row depend on."""
        own = {self.client} if self.client and any(column.by_client for column in self.columns) else set()
        return {column.name for column in self.columns} | own

    def features(
        self, fields: Callable[[str], Fields], where: str, first_row: int = 2, clients: Fields | None = None
    ) -> Array:
        """The features of all rows, float32 [rows, width], stored column by column.

        `fields` returns a column by its name; it may drop the column, which is not asked for again.
        """
        own = [column.name for column in self.columns if column.by_client]
        scales = self._scales(clients, where, first_row) if own else None
        x, end = np.empty((0, 0), np.float32), 0
        for column in self.columns:
            constants = None
            if scales is not None and column.by_client:
                at = own.index(column.name)
                constants = scales[:, at, 0], scales[:, at, 1]
            found = fields(column.name)
            if not end:
                x = np.empty((self.width, len(found)), np.float32)
            end += column.width
            column.encode(found, x[end - column.width : end], where, first_row, constants)
        return x.T

    def _scales(self, clients: Fields | None, where: str, first_row: int) -> Array:
        """The center and spread of the client of every row, [rows, columns, 2]."""
        if clients is None and len(self.scales) == 1:
            (only,) = self.scales.values()
            return np.array([only])
        why = "every client has its own scale (scale: per-client)"
        require(clients is not None, f"{where} must name the client of every row: {why}.", DataError)
        assert clients is not None
        key: Callable[[str], str] = likeness if self.spelling.merge_names else str
        scales = {key(name): several for name, several in self.scales.items()}
        known = np.array([key(word) in scales for word in clients.words] + [False])[clients.codes]
        if not known.all():
            row = int(known.argmin())
            others = ", ".join([*self.scales][:NAMED_CLIENTS]) + (", ..." if len(self.scales) > NAMED_CLIENTS else "")
            unknown = f"no scale is known for the client {reprlib.repr(clients.text(row))}, only for {others}"
            raise DataError(f"{where}, row {row + first_row}: {unknown}; {why}.")
        found: Array = np.array([scales[key(word)] for word in clients.words])[clients.codes]
        return found

    def of_client(self, name: str) -> TableEncoding:
        """The encoding of this client's rows: without the constants of others."""
        if not self.scales:
            return self
        require(name in self.scales, f"client {name} has no training rows, so there is no scale for its numbers.")
        return replace(self, scales={name: self.scales[name]})

    @property
    def names(self) -> set[str]:
        """The columns of names: the label, unless it is a number, and the client."""
        return {name for name in (self.label, self.client) if name}
