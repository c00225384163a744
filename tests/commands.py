"""How tests call the command line and read what a run left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FILES = {"config.yaml", "metrics.jsonl", "model.safetensors", "environment.json", "preprocessing.json", "checkpoints"}
SMALL = {
    "rounds": 3,
    "data": {"name": "digits", "clients": 10, "partition": {"name": "sort", "labels_per_client": 2}},
    "model": {"name": "mlp", "hidden": [16]},
    "method": {"name": "fedadc", "beta": 0.9},
    "local": {"steps": 4, "batch_size": 16, "lr": 0.1},
    "cohort": {"size": 4},
}


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, but for a lock."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Answer]


def command(*words: str, cwd: Path) -> Answer:
    """`fedadc ...` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "fedadc", *words], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def fine(answer: Answer) -> str:
    assert answer.code == 0, answer.err
    assert "Traceback" not in answer.err
    return answer.out


def refused(answer: Answer, fragment: str = "", code: int = 2) -> str:
    """One sentence on stderr, this exit code, nothing on stdout."""
    assert (answer.code, answer.out) == (code, ""), answer
    lines = answer.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and fragment in lines[0], answer.err
    return lines[0]


def records(run: Path, seconds: bool = True) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if seconds or k != "seconds"} for line in lines]
