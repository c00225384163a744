"""What a model says of new data, as arrays, as a DataFrame and as files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedadc.data.dataset import Array, DataSpec
from fedadc.errors import DiskError, require, unknown
from fedadc.fields.summary import summary
from fedadc.system.files import require_new_file, write_file

PREDICTION, PROBABILITY = "prediction", "p_"  # the column of classes, and the prefix of those of probabilities
PREDICTED = "predicted_"  # the prefix of columns of numbers


@dataclass(frozen=True)
class Predictions:
    """What a model says of every row of new data, in the order of the data."""

    outputs: Array  # [rows, outputs], as the model gives them: logits, or scaled numbers
    spec: DataSpec  # with the classes, or with the targets of a regression
    rows: Mapping[str, Array]  # further columns of a file that say which row is meant: {"file": ...}
    notes: tuple[str, ...] = ()  # remarks on the data: columns that were ignored, categories that are unknown

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        what = {"classes": list(self.spec.classes[:10])} if self.spec.classes else {"targets": len(self.spec.targets)}
        return summary("Predictions", {"rows": len(self), **what, "notes": len(self.notes)})

    @cached_property
    def values(self) -> Array:
        """The probability of every class, or the predicted numbers in units of the labels: [rows, outputs]."""
        found = self.spec.task.predicted(torch.from_numpy(self.outputs))
        return found.astype(self.outputs.dtype) if self.spec.classes else found

    @property
    def probabilities(self) -> Array:
        """The probability of every class, [rows, classes]."""
        require(bool(self.spec.classes), "a regression predicts no classes; its numbers are in `values`.")
        return self.values

    @cached_property
    def classes(self) -> Array:
        """The predicted class of every row, by its name."""
        require(bool(self.spec.classes), "a regression predicts no classes; its numbers are in `values`.")
        predicted: Array = np.array(self.spec.classes)[self.outputs.argmax(axis=1)]
        return predicted

    def columns(self) -> dict[str, Array]:
        """The columns of a file: the predicted class and the probability of every class, or the predicted numbers."""
        if not self.spec.classes:
            numbers = {f"{PREDICTED}{t.name}": self.values[:, i] for i, t in enumerate(self.spec.targets)}
            return {**self.rows, **numbers}
        shares = {f"{PROBABILITY}{name}": self.values[:, i] for i, name in enumerate(self.spec.classes)}
        return {**self.rows, PREDICTION: self.classes, **shares}

    def to_frame(self) -> Any:
        """A pandas DataFrame with these columns."""
        require(
            find_spec("pandas") is not None, "to_frame needs pandas; install it with `pip install 'fedadc[pandas]'`."
        )
        import pandas

        return pandas.DataFrame(self.columns())

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write a .csv, .json or .parquet file. An existing one is kept, unless `overwrite`."""
        file = checked_target(Path(path), overwrite)
        content = WRITERS[file.suffix.lower()](self.columns())
        try:
            write_file(file, content)
        except OSError as error:
            raise DiskError(f"cannot write to {file} ({error.strerror or error}).") from error
        return file


def checked_target(file: Path, overwrite: bool) -> Path:
    """Refuse a file that could not be written, before anything is computed."""
    require(not file.is_dir(), f"out: {file} is a folder; a file is needed.")
    if file.suffix.lower() not in WRITERS:
        raise unknown("out: the ending", file.suffix, WRITERS)
    require_new_file(file, "out", overwrite)
    parquet = file.suffix.lower() != ".parquet" or find_spec("pyarrow") is not None
    require(parquet, "Parquet needs pyarrow; install it with `pip install 'fedadc[tables]'`.")
    return file


def as_csv(columns: Mapping[str, Array]) -> bytes:
    """A CSV file in UTF-8. A number has as many digits as are needed to read it back exactly."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(column.astype(str).tolist() for column in columns.values()), strict=True))
    return stream.getvalue().encode()


def as_json(columns: Mapping[str, Array]) -> bytes:
    """A list with an object for every row."""
    values = [column.tolist() if column.dtype.kind != "f" else _shortest(column) for column in columns.values()]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
    return b"[" + b",\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows) + b"]\n"


def _shortest(column: Array) -> list[float]:
    """Numbers with as few digits as their type needs: a float32 has nine at most."""
    return [float(text) for text in column.astype(str)]


def _as_parquet(columns: Mapping[str, Array]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({name: pyarrow.array(column) for name, column in columns.items()}), stream)
    return stream.getvalue()


WRITERS: dict[str, Callable[[Mapping[str, Array]], bytes]] = {
    ".csv": as_csv,
    ".json": as_json,
    ".parquet": _as_parquet,
}
