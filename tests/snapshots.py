"""A run of a few rounds, and copies of its folder as a kill would have left it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fedadc

CONFIG: dict[str, Any] = {
    "rounds": 6,
    "data": {"name": "digits", "clients": 12, "partition": {"name": "dirichlet", "alpha": 1.0}},
    "model": {"name": "mlp", "hidden": [8], "projection": 4},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.1, "schedule": {"name": "cosine"}},
    "cohort": {"size": 5},
    "evaluate": {"every": 2},
    "checkpoint": {"every": 1},
}


def outcome(out: Path) -> dict[str, Any]:
    """All that must not depend on interruptions."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = {p.name: p.read_bytes() for p in (out / "checkpoints").rglob("*.safetensors")}
    last = max(name for name in kept if name.startswith("round"))
    newest = json.loads((out / "checkpoints" / last.replace("safetensors", "json")).read_text())["manifest"]
    clients = {f"{client}-{round}.safetensors" for client, round, _ in newest["clients"]}
    return {
        "metrics": [{k: v for k, v in line.items() if k != "seconds"} for line in lines],
        "models": {p.name: p.read_bytes() for p in out.glob("model*.safetensors")},
        "state": {name: kept[name] for name in {last, *clients}},
    }


def run_with_snapshots(config: dict[str, Any], out: Path, rounds: set[int]) -> None:
    """A run in one go, with copies of its folder as a kill -9 after these rounds would have left it."""

    def watch(record: dict[str, Any]) -> None:
        if record["round"] in rounds:
            shutil.copytree(out, out.with_name(f"after-{record['round']}"))

    fedadc.run(config, out=out, watch=watch)
