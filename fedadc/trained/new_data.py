"""New data for a trained model, without labels: files, folders, DataFrames, columns by name, arrays.

Everything becomes raw inputs of the kind that the model was trained on; what is left out or unknown is noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedadc.data.columns import Fields
from fedadc.data.dataset import Array, Samples
from fedadc.data.encoding import TableEncoding
from fedadc.data.features import MISSING_CATEGORY
from fedadc.data.loaders.arrays import inputs_like
from fedadc.data.loaders.images import read_unlabeled_images
from fedadc.data.loaders.npz import read_npz
from fedadc.data.loaders.rows import columns_of, encoded
from fedadc.data.schema import DataSchema
from fedadc.errors import DataError, require

SHOWN_NAMES = 5  # columns or categories in a note


@dataclass(frozen=True)
class NewData:
    """Inputs to predict, in the order of the rows."""

    samples: Samples
    rows: Mapping[str, Array] = field(default_factory=dict)  # what names the rows, if something does
    notes: tuple[str, ...] = ()


def read_new_data(data: Any, schema: DataSchema) -> NewData:
    """The inputs in a file, a folder, a DataFrame, columns by name, an array, or samples of a data set."""
    if isinstance(data, str | Path):
        return _read_path(Path(data), schema)
    if isinstance(data, Samples):  # of a table, encoded already
        return NewData(inputs_like(schema.spec, data.x, "x"))
    if isinstance(data, Mapping) or hasattr(data, "columns"):
        require(schema.encoding is not None, _no_table(schema))
        return _from_table("the table", data, schema)
    return _from_array("the array", data, schema)


def _read_path(path: Path, schema: DataSchema) -> NewData:
    require(path.exists(), f"data: there is no {path}.", DataError)
    if path.is_dir():
        return _from_images(path, schema)
    if path.suffix.lower() == ".npz":
        return _from_npz(path, schema)
    require(schema.encoding is not None, f"{path}: {_no_table(schema)}")
    return _from_table(str(path), path, schema)


def _no_table(schema: DataSchema) -> str:
    images = ", or a folder of images" if len(schema.shape) == 3 else ""
    shape = list(schema.shape)
    return f"the model was trained on arrays, not on a table; give an array [n, *{shape}], an .npz file with x{images}."


def _from_table(where: str, rows: Any, schema: DataSchema) -> NewData:
    encoding = schema.encoding
    assert encoding is not None
    columns, others = columns_of(rows, encoding)
    x = encoded(columns, encoding, where)
    notes = (*_ignored(where, others), *_imputed(where, columns, encoding), *_unknown(where, columns, encoding))
    return NewData(inputs_like(schema.spec, x, where), notes=notes)


def _from_array(where: str, array: Any, schema: DataSchema) -> NewData:
    """Raw inputs. For a table they are its columns of numbers, in the order of training."""
    if schema.encoding is None:
        return NewData(inputs_like(schema.spec, array, "x" if where == "the array" else where))
    columns = schema.encoding.columns
    instead = "give a DataFrame, a dict of columns or a CSV file"
    named = [column.name for column in columns if column.categories is not None or column.by_client]
    require(
        not named,
        f"{where} names no columns, but the model was trained on a table whose columns are not all plain numbers "
        f"({_shown(named)}); {instead}.",
    )
    try:
        values = np.asarray(array.detach().cpu() if isinstance(array, Tensor) else array)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} must be numbers of one shape ({error}).") from error
    order = f"the columns {_shown([column.name for column in columns])}, in this order"
    require(
        values.ndim == 2 and values.shape[1] == len(columns),
        f"{where} has the shape {list(values.shape)}, but the model needs [n, {len(columns)}]: {order}; or {instead}.",
    )
    return _from_table(where, {column.name: values[:, i] for i, column in enumerate(columns)}, schema)


def _ignored(where: str, left: Sequence[str]) -> list[str]:
    return [f"{where}: columns that the model does not use are ignored: {_shown(left)}"] if left else []


def _imputed(where: str, columns: Mapping[str, Fields], encoding: TableEncoding) -> list[str]:
    """Notes on missing numbers of columns that had no gap in training, with their number."""
    notes = []
    for column in encoding.columns:
        if column.categories is None and not column.has_missing:
            gaps, rows = int(np.isnan(columns[column.name].numbers).sum()), len(columns[column.name])
            center = "the client's own center" if column.by_client else f"its center {column.center!r}"
            if gaps:
                notes.append(
                    f"{where}: column {column.name} has missing numbers, which training did not have, in {gaps:,} of "
                    f"{rows:,} rows; {center} stands for them"
                )
    return notes


def _unknown(where: str, columns: Mapping[str, Fields], encoding: TableEncoding) -> list[str]:
    """Notes on categories that did not occur in training, with the number of rows that have them."""
    notes = []
    for column in encoding.columns:
        if column.categories is None:
            continue
        known, fields = {*column.categories}, columns[column.name].as_texts()
        rows_of_word = np.bincount(fields.codes + 1, minlength=len(fields.words) + 1).tolist()  # the first: missing
        counts = Counter(dict(zip((MISSING_CATEGORY, *fields.words), rows_of_word, strict=True)))
        unknown = sorted(name for name, count in counts.items() if count and name not in known)
        if unknown:
            rows = sum(counts[name] for name in unknown)
            notes.append(
                f"{where}: column {column.name} has categories that training did not have, in {rows:,} of "
                f"{counts.total():,} rows: {_shown([f'{name} ({counts[name]:,})' for name in unknown])}; "
                "all features of the column are 0 there"
            )
    return notes


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(name[:60] for name in names[:SHOWN_NAMES]) + more


def _from_npz(path: Path, schema: DataSchema) -> NewData:
    arrays = read_npz(path)
    name = next((name for name in ("x", "x_test") if name in arrays), None)
    require(name is not None, f"{path} needs an array x; it has {', '.join(list(arrays)[:10]) or 'none'}.", DataError)
    others = [other for other in arrays if other != name]
    notes = (f"{path}: arrays other than {name} are ignored: {_shown(others)}",) if others else ()
    found = _from_array(str(path), arrays[str(name)], schema)
    return replace(found, notes=(*notes, *found.notes))


def _from_images(path: Path, schema: DataSchema) -> NewData:
    require(
        len(schema.shape) == 3, f"{path} contains images, but the model takes inputs {list(schema.shape)}.", DataError
    )
    channels, height, width = schema.shape
    x, names = read_unlabeled_images(path, (width, height))
    x = np.repeat(x, channels, axis=1) if x.shape[1] == 1 else x
    return NewData(inputs_like(schema.spec, x, str(path)), {"file": np.array(names)})
