"""Damaged and malicious run directories: they are read, or a one-sentence error says why not."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedadc
from fedadc.analysis.compare import summarize
from fedadc.errors import FedadcError
from fedadc.runs.evaluate import evaluate
from fedadc.runs.record import read_run
from mutate import mutated, read_or_refused
from snapshots import CONFIG, outcome

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@cache
def a_run() -> Path:
    """A run of four rounds with two checkpoints. Tests must damage only copies of it."""
    out = Path(tempfile.mkdtemp()) / "run"
    fedadc.run({**CONFIG, "rounds": 4, "method": "scaffold"}, out=out)
    return out


@pytest.fixture(scope="module", autouse=True)
def _clean() -> Any:
    yield
    shutil.rmtree(a_run().parent)


def read_all(path: Path) -> None:
    run = read_run(path)
    summarize([run])
    run.stopped()
    run.config()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "environment.json"])
@given(data=st.data())
def test_files_with_any_bytes_are_read_or_rejected(name: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as room:
        place = Path(room) / "run"
        shutil.copytree(a_run(), place, ignore=shutil.ignore_patterns("checkpoints"))
        (place / name).write_bytes(data.draw(mutated((place / name).read_bytes())))
        read_or_refused(lambda: read_all(place))


@given(
    st.sampled_from(["round", "cohort", "bytes_up", "test_accuracy", "train_loss", "skipped", "events", "lr"]), VALUES
)
def test_records_with_any_value_are_read_or_rejected(key: str, value: Any) -> None:
    with tempfile.TemporaryDirectory() as room:
        place = Path(room) / "run"
        shutil.copytree(a_run(), place, ignore=shutil.ignore_patterns("checkpoints"))
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        lines[-1][key] = value
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        read_or_refused(lambda: read_all(place))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no finished round yet"),
        (b'{"round": 1', "has no finished round yet"),  # an incomplete line
        (b"\n", "line 1 is damaged"),
        (b"[" * 100_000 + b"\n", "line 1 is damaged"),
        (b"\xff\xfe\n", "cannot be read"),
        (b"7\n", "line 1 is not the record of a round"),
        (b'{"round": 2}\n{"round": 2}\n', "line 2 is round 2, which must be greater than 2"),
        (b'{"round": 1}\n{"rou', None),
    ],
)
def test_damaged_metrics(content: bytes, words: str | None, tmp_path: Path) -> None:
    shutil.copytree(a_run(), tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_bytes(content)
    if words is None:
        assert [r["round"] for r in read_run(tmp_path / "run").records] == [1]
        return
    with pytest.raises(FedadcError, match=words):
        read_run(tmp_path / "run")


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    shutil.copytree(a_run(), tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "run/metrics.jsonl")
    with pytest.raises(FedadcError, match=r"has no metrics\.jsonl"):
        read_run(tmp_path / "run")
    with pytest.raises(FedadcError, match=r"metrics\.jsonl is not a file"):
        fedadc.resume(tmp_path / "run", ["rounds=5"])


def files_of_checkpoints() -> list[str]:
    return sorted(str(p.relative_to(a_run())) for p in (a_run() / "checkpoints").rglob("*") if p.is_file())


@settings(max_examples=25)
@given(data=st.data())
def test_a_run_with_a_damaged_file_is_resumed_correctly_or_rejected(data: st.DataObject) -> None:
    """Any damage to any file: the same bits as an undamaged run, or a one-sentence error."""
    with tempfile.TemporaryDirectory() as room:
        place, whole = Path(room) / "run", Path(room) / "whole"
        shutil.copytree(a_run(), place)
        shutil.copytree(a_run(), whole)
        name = data.draw(st.sampled_from([*files_of_checkpoints(), "metrics.jsonl"]))
        (place / name).write_bytes(data.draw(mutated((place / name).read_bytes())))
        refused = read_or_refused(lambda: fedadc.resume(place, ["rounds=5"]))
        if refused is None:
            fedadc.resume(whole, ["rounds=5"])
            assert outcome(place)["state"] == outcome(whole)["state"]
            assert outcome(place)["models"] == outcome(whole)["models"]


@given(data=st.data())
@settings(max_examples=25)
def test_a_damaged_model_is_evaluated_or_rejected(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as room:
        place = Path(room) / "run"
        shutil.copytree(a_run(), place, ignore=shutil.ignore_patterns("checkpoints"))
        (place / "model.safetensors").write_bytes(data.draw(mutated((place / "model.safetensors").read_bytes())))
        read_or_refused(lambda: evaluate(place))
