"""Read further samples for an existing data set, from an .npz file, a folder of images or, for a table, a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedadc.data.dataset import Array, Dataset, Samples
from fedadc.data.loaders.arrays import checked_owners, samples_like
from fedadc.data.loaders.csv import csv_like
from fedadc.data.loaders.frame import frame_like
from fedadc.data.loaders.images import read_images
from fedadc.data.loaders.npz import pair_in, read_npz
from fedadc.errors import DataError, require


def read_samples(path: Path, like: Dataset) -> Samples:
    """Samples from a file or a folder of images, converted to the classes and input shape of `like`."""
    return read_owned_samples(path, like)[0]


def read_owned_samples(path: Path | Any, like: Dataset) -> tuple[Samples, Array | None]:
    """The samples of a file, folder or DataFrame, and the client of every one; None if it does not say it."""
    owners = None
    if not isinstance(path, Path):
        kind = type(path).__name__
        by_name = isinstance(path, Mapping) or hasattr(path, "columns")
        require(by_name, f"data must be a path, a DataFrame or columns by name, not {kind}.")
        table = frame_like(path, like, "data")
        return table.train, table.owners
    if like.encoding is not None:
        require(
            not path.is_dir(), f"{path} is a folder, but the model was trained on a table; give a CSV file.", DataError
        )
        table = csv_like(path, like)
        return table.train, table.owners
    if path.is_dir():
        path = path / "test" if (path / "test").is_dir() else path
        require(
            len(like.input_shape) == 3,
            f"{path} contains images, but the model was trained on inputs of shape {list(like.input_shape)}.",
            DataError,
        )
        channels, height, width = like.input_shape
        x, y = read_images(path, (width, height))
        x = np.repeat(x, channels, axis=1) if x.shape[1] == 1 else x
    else:
        arrays = read_npz(path)
        x, y = pair_in(arrays, path, ("", "_test"))
        owners = arrays.get("client" if {"x", "y"} <= arrays.keys() else "client_test")
        owners = None if owners is None else checked_owners(owners, len(y), path.name)
    return samples_like(like.classes, x, y, path.name, like.targets), owners
