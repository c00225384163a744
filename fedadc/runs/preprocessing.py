"""RUN/preprocessing.json: how the inputs of a run's model are prepared, and whom it was trained with.

It has no sample. With it, new data can be predicted where the training data is not. It is written before the first
round, carries its own checksum, and is read as if a stranger had written it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedadc.data.schema import DataSchema
from fedadc.errors import DataError, kind_of_failure, one_line, require, require_file
from fedadc.fields.plain import from_json, to_json
from fedadc.runs.layout import PREPROCESSING
from fedadc.server_half import ServerHalf
from fedadc.system.files import checksum

PREPROCESSING_FORMAT = 1
INPUT_TYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
MOST_INPUTS = 1 << 28  # of one input; more are refused before memory is allocated for them
DAMAGED = "it is damaged, or another program has changed it; restore it, or delete it if the run's data is here"


@dataclass(frozen=True)
class Preprocessing:
    """What a model's user needs to know of its data."""

    schema: DataSchema
    clients: tuple[str, ...] | None  # their names; None: they are numbered
    samples: Mapping[str, int]  # of every split, as far as they are known

    def __post_init__(self) -> None:
        shape, constants = self.schema.shape, self.schema.normalization
        require(math.prod(shape) <= MOST_INPUTS, f"inputs of shape {list(shape)!r:.60} are too large.", DataError)
        require(self.schema.dtype in INPUT_TYPES, f"inputs have the unknown type {self.schema.dtype!r:.40}.", DataError)
        for what, names in (("classes", self.schema.classes), ("clients", self.clients or ())):
            require(len(set(names)) == len(names), f"two {what} have the same name.", DataError)
        possible = len(constants.mean) == len(constants.std) in (0, 1, shape[0])
        possible = possible and all(map(math.isfinite, (constants.scale, *constants.mean, *constants.std)))
        possible = possible and all(value > 0 for value in (constants.scale, *constants.std))
        require(possible, "the constants of the normalization cannot be.", DataError)


def preprocessing_of(federation: ServerHalf) -> Preprocessing:
    """The record of a federation's data."""
    names = federation.client_names
    numbered = names == tuple(map(str, range(len(names))))
    return Preprocessing(federation.data_schema, None if numbered else names, federation.samples_of_splits)


def as_file(preprocessing: Preprocessing) -> bytes:
    """The content of the file; equal values give equal bytes."""
    tree = json.loads(to_json(preprocessing))
    outer = {"format": PREPROCESSING_FORMAT, "checksum": _checksum(tree), "preprocessing": tree}
    return json.dumps(outer, indent=1, ensure_ascii=False).encode() + b"\n"


def read_preprocessing(run: Path) -> Preprocessing | None:
    """The record in a run directory; None if an earlier version of fedadc wrote the run."""
    path = run / PREPROCESSING
    if not path.exists():
        return None
    require_file(path, "preprocessing")
    try:
        outer = json.loads(path.read_bytes())
        version, expected, tree = (outer[key] for key in ("format", "checksum", "preprocessing"))
        undamaged = version != PREPROCESSING_FORMAT or _checksum(tree) == expected
    except OSError as error:
        raise kind_of_failure(error)(f"{path} cannot be read ({one_line(error)}).") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{path} cannot be used: {DAMAGED}.") from None
    readable = f"its format is {version!r:.20}, but this version of fedadc reads format {PREPROCESSING_FORMAT}"
    require(version == PREPROCESSING_FORMAT, f"{path} cannot be used: {readable}.", DataError)
    require(undamaged, f"{path} cannot be used: {DAMAGED}.", DataError)
    return from_json(Preprocessing, json.dumps(tree).encode(), str(path))


def _checksum(tree: object) -> str:
    return checksum(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode())
