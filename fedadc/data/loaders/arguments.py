"""The arguments that Python users give to `from_csv`, `from_npz` and `from_images`."""

from __future__ import annotations

import os
from pathlib import Path

from fedadc.errors import require


def path_of(value: str | os.PathLike[str], name: str = "path") -> Path:
    require(isinstance(value, str | os.PathLike), f"{name} must be a path, not {value!r:.60}.")
    return Path(value)


def file_or_share(test: str | os.PathLike[str] | float | None) -> tuple[Path | None, float | None]:
    """The file or folder of the test data, or the share of the training data to hold out; None for what is not given.

    A share of 0 holds out nothing.
    """
    if test is None or isinstance(test, int | float):
        return None, test or None
    return path_of(test, "test"), None
