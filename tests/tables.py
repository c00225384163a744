"""A table of patients, with numbers, categories and gaps, and the config of a run on it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 90
LOCAL = {"steps": 3, "batch_size": 8, "lr": 0.05}


def write_table(path: Path, rows: int = ROWS, labels: bool = True, **strange: str) -> None:
    """Numbers, categories and gaps; the label depends on them."""
    rng = np.random.default_rng(rows)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["age", "cp", "ward", *(["sick"] if labels else []), *strange])
        for k in range(rows):
            age = "" if k % 11 == 5 else f"{rng.normal(40, 12):.3f}"
            cp = ["typical", "atypical", "none of these", "NA"][int(rng.integers(4))]
            sick = "yes" if (k + (cp == "typical")) % 3 else "no"
            writer.writerow([age, cp, f"w{k % 4}", *([sick] if labels else []), *strange.values()])


def table_config(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "rounds": 2,
        "data": {"name": "csv", "path": str(path), "label": "sick", "client": "ward", "scale": {"age": [40, 12]}},
        "model": {"name": "mlp", "hidden": [6]},
        "local": LOCAL,
        "evaluate": {"batch_size": 16},
        **more,
    }
