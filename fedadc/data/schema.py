"""The kind of a federation's data as a value: shape, type, classes, constants and, for tables, the encoding of columns.

It has no sample. Sites agree on it before they train, and a run stores it, so that new data can be prepared in the same
way. As text it is JSON; equal values give equal bytes. What is read is checked as if a stranger had written it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fedadc.data.dataset import Dataset, DataSpec, Normalization
from fedadc.data.encoding import TableEncoding
from fedadc.errors import DataError, kind_of_failure, one_line, require, require_file
from fedadc.fields.plain import from_json
from fedadc.tasks import Target


@dataclass(frozen=True)
class DataSchema:
    """What the server and all clients agree on about the data."""

    shape: tuple[int, ...]  # of one input
    dtype: str  # of the inputs
    classes: tuple[str, ...]
    normalization: Normalization
    encoding: TableEncoding | None = None  # of a table
    targets: tuple[Target, ...] = ()  # the numbers to predict; none if the labels are classes

    def __post_init__(self) -> None:
        known = isinstance(getattr(torch, self.dtype, None), torch.dtype)
        require(known, f"inputs have the unknown type {self.dtype!r:.40}.", DataError)
        require(min(self.shape, default=0) > 0, f"inputs of shape {list(self.shape)!r:.60} are empty.", DataError)
        if self.encoding is not None:
            width = [self.encoding.width]
            require([*self.shape] == width, f"columns give {width} features, not {list(self.shape)!r:.60}.", DataError)

    @staticmethod
    def of(data: Dataset) -> DataSchema:
        """The schema of a data set."""
        dtype = str(data.train.x.dtype).removeprefix("torch.")
        return DataSchema(data.input_shape, dtype, data.classes, data.normalization, data.encoding, data.targets)

    @staticmethod
    def read(path: Path) -> DataSchema:
        """The schema in a file."""
        require_file(path, "data")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise kind_of_failure(error)(f"{path} cannot be read ({one_line(error)}).") from error
        return from_json(DataSchema, text, str(path))

    @property
    def spec(self) -> DataSpec:
        """The part that a model is built from."""
        return DataSpec(self.shape, getattr(torch, self.dtype), self.classes, self.normalization, self.targets)
