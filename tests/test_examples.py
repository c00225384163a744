"""The programs in `examples/` run, and show what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from family import linux

EXAMPLES = Path(__file__).parents[1] / "examples"


@linux
@pytest.mark.federation
def test_three_sites() -> None:
    program = [sys.executable, str(EXAMPLES / "three_sites.py")]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=400)
    assert "the model is that of the simulation: True" in done.stdout
    assert all(f",{hospital}," in done.stdout for hospital in ("bern", "lugano", "zug"))


def test_regression() -> None:
    program = [sys.executable, str(EXAMPLES / "regression.py")]
    lines = subprocess.run(program, capture_output=True, text=True, check=True, timeout=100).stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["FedAvg", "FedADC"]
    assert all(float(line.rpartition(" ")[2]) > 0.8 for line in lines[:2])
    clear, cloudy = (int(word) for word in lines[2].split() if word.isdigit())
    assert clear > 1.5 * cloudy > 0


def test_predict() -> None:
    program = [sys.executable, str(EXAMPLES / "predict.py")]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300)
    first, second, _, note, exported = done.stdout.splitlines()
    assert first.startswith("healthy ") and second.startswith("ill ")
    assert "pain has categories that training did not have, in 1 of 3 rows: unbearable (1)" in note
    assert exported == "exported: model.safetensors, model.pt2, model.json, README.md"


def test_batch_norm() -> None:
    program = [sys.executable, str(EXAMPLES / "batch_norm.py")]
    lines = subprocess.run(program, capture_output=True, text=True, check=True, timeout=100).stdout.splitlines()
    fedbn, fedavg = (float(line.rpartition(" ")[2]) for line in lines)
    assert fedbn > fedavg + 0.1 > 0.4


def test_hospitals() -> None:
    program = [sys.executable, str(EXAMPLES / "hospitals.py")]
    lines = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()
    assert lines[0].startswith("refused: patients.csv, column hospital has 'Bern' and 'bern'")
    assert any("id has another value in every row" in line for line in lines)
    accuracy = {line.split(":")[0]: float(line.split()[3].rstrip(",")) for line in lines[-3:]}
    assert min(accuracy["scale standard"], accuracy["scale per-client"]) > 0.7 > accuracy["scale none"] + 0.1
