"""What a federation refuses, each tried by a real client that does it: nothing of it changes what is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from family import linux
from fedadc.config.settings import Config
from fedadc.runs.record import load_config, read_run
from fedadc.runs.runner import run
from fedadc.sites.journal import audit_file, changed_line
from federations import parts_of

pytestmark = [linux, pytest.mark.federation, pytest.mark.usefixtures("nothing_is_left")]
HOSTILE = Path(__file__).parents[1] / "hostile"
NAMES = ("anna", "bert", "mallory")
LARGE = 80_000_000  # bytes of an upload that should have 2,000
# what mallory does, round by round -> what the record of the round says of it
ATTACKS = {
    "honest": "",
    "another run": "of another run",
    "past round": "the result is of round 1, client 2, but round 3, client 2 was asked for",
    "another client": "client 0, but round 4, client 2 was asked for",
    "names": "lacks or should not have delta, gamma",
    "shape": "has delta as [1, ",
    "dtype": "torch.int32, but it must be",
    "nan": "its update is not finite",
    "infinity": "its update is not finite",
    "truncated": "the message is damaged",
    "garbage": "the message is damaged, or not one of fedadc",
    "pickle": "the message is damaged, or not one of fedadc",
    "long header": "the message is damaged, or not one of fedadc",
    "deep header": "the message is damaged, or not one of fedadc",
    "no records": "the message is not one of fedadc: it lacks",
    "a long problem": "lies lies",
    "huge": "bytes, which none can have",
}


def data_of(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    path, client = folder / "all.npz", np.array(NAMES)[np.arange(90) % 3]
    np.savez(path, x=rng.normal(size=(90, 6)), y=rng.choice(3, 90), client=client)
    return path


def config_of(folder: Path, **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "rounds": 2, "seed": 2, "data": {"name": "npz", "path": str(data_of(folder))},
        "model": {"name": "mlp", "hidden": [16], "projection": 6}, "method": "scaffold", "checkpoint": {"every": 1},
        "local": {"epochs": 1, "batch_size": 8, "lr": 0.1}, "federation": {"quorum": 0.5, "deadline": 120},
    }  # fmt: skip
    return load_config({**tree, **changes})


def peak_memory(pid: int) -> int:
    """The most bytes that a process has used."""
    (line,) = [own for own in Path(f"/proc/{pid}/status").read_text().splitlines() if own.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def test_uploads_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tree = config_of(tmp_path, rounds=len(ATTACKS) + 1), {}
    hostile = {"PYTHONPATH": str(HOSTILE), "HOSTILE": ",".join([*ATTACKS, "honest", "counts"])}
    hostile |= {"HOSTILE_FOLDER": str(tmp_path), "HOSTILE_BYTES": str(LARGE)}
    with parts_of(config, tmp_path / "there", {"mallory": hostile}) as parts:
        parts.after_round(len(ATTACKS) - 1, 400)
        (server,) = [pid for pid in parts.processes("flwr-serverapp") if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()][-1:]
        before = peak_memory(server)
        parts.after_round(len(ATTACKS), 200)
        grown = peak_memory(server) - before
        parts.finished()
    out = parts.federation.run
    records = read_run(out).records
    for number, (attack, said) in enumerate(ATTACKS.items(), start=1):
        events = "\n".join(event for event in records[number - 1].get("events", ()) if "upload" in event)
        left_out = records[number - 1].get("dropped", []) + records[number - 1].get("skipped", [])
        assert left_out == ([] if attack == "honest" else [2]), attack
        assert (said in events and f"round {number}, site mallory: " in events) or attack == "honest", (attack, events)
        assert len(events) < 1000 and events.isprintable() == ("\n" not in events), attack
    assert not (tmp_path / "executed").exists()
    assert "evaluation without mallory" in "\n".join(records[0]["events"])
    assert grown < LARGE / 2, grown
    audit = [json.loads(line) for line in audit_file(out).read_text().splitlines()]
    refused = [line["round"] for line in audit if line["event"] in ("refused", "problem") and "upload" in line["text"]]
    assert sorted(refused) == list(range(2, len(ATTACKS) + 1)) and changed_line(audit_file(out)) is None
    assert all(line["site"] == "mallory" for line in audit if line["event"] in ("refused", "problem"))
    tree = {**config.tree(), "faults": {"trace": str(out / "trace.jsonl")}, "federation": None}
    tree["data"] = {**tree["data"], "test": 0.2}
    run(load_config(tree), out=tmp_path / "repeated")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "repeated/model.safetensors").read_bytes()
