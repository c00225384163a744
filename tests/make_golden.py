"""Writes golden.json: figures of short runs on digits. Run it (`make golden`) only when results are meant to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedadc.methods import METHODS, PAIRS
from fedadc.runs.runner import run

GOLDEN = Path(__file__).with_name("golden.json")
CONFIG: dict[str, Any] = {
    "seed": 11,
    "rounds": 8,
    "data": {"name": "digits", "clients": 30, "partition": {"name": "dirichlet", "alpha": 0.3}},
    "model": {"name": "mlp", "hidden": [32]},
    "local": {"epochs": 1, "batch_size": 16, "lr": 0.1, "weight_decay": 1e-4, "schedule": "cosine"},
    "cohort": {"size": 6},
}


def figures(method: str) -> dict[str, Any]:
    model = {**CONFIG["model"], **({"projection": 16} if method == "moon" else {})}
    result = run({**CONFIG, "method": method, "model": model})
    last = result.history[-1]
    first = last["cohort"][0]
    moved = result.state.clients[first]["model"] if method in ("local_only", "ditto") else result.state.theta
    return {
        "norm": float(moved.double().norm()),
        "train_loss": last["train_loss"],
        "test_loss": last["personal_loss" if METHODS.get(method, METHODS["fedavg"])().headless else "test_loss"],
        "cohort": last["cohort"],
    }


if __name__ == "__main__":
    golden = {method: figures(method) for method in [*METHODS, *PAIRS]}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
