"""`fedadc predict`: predictions for new data without labels, by the model of a run or a client's own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fedadc.system.user_code import Notes
from fedadc.trained.load import Watcher, load
from fedadc.trained.predictions import Predictions, checked_target

log = logging.getLogger("fedadc")


def predict(
    run: str | Path,
    data: Any,
    out: str | Path | None = None,
    *,
    model: str | None = None,
    client: str | int | None = None,
    regularizer: str | None = None,
    overwrite: bool = False,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    trust: bool = False,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> Predictions:
    """Predict new data: a path (.csv, .npz or a folder of images), a DataFrame, a dict of columns, or an array.

    With `out`, a .csv, .json or .parquet file is written. `model`, `client`, `regularizer`, `data_dir`, `device` and
    `trust` are those of `load`. `watch` is called with the number of rows that are done and of all rows.
    """
    target = None if out is None else checked_target(Path(out), overwrite)
    loaded = load(
        run,
        model=model,
        client=client,
        regularizer=regularizer,
        data_dir=data_dir,
        device=device,
        trust=trust,
        notes=notes,
    )
    found = loaded.predict(data, watch)
    for note in found.notes:
        notes(note)
    if target is not None:
        found.save(target, overwrite)
    return found
