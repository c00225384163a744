"""Personal models of a regression: compared by the mean squared error, where less is better."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedadc
from fedadc.errors import FedadcError
from fedadc.models import MLP
from fedadc.personal.folder import personal_state_dict
from fedadc.personal.personalize import personalize

SPREAD = 1000.0  # of the level between clients


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Six clients whose labels have a slope of their own: a model of one's own is much better."""
    rng = np.random.default_rng(3)
    x, client = rng.normal(size=(240, 3)).astype(np.float32), np.arange(240) % 6
    y = SPREAD * (client - 2.5) * x[:, 0]
    np.savez(tmp_path / "numbers.npz", x=x, y=y, client=client)
    return {
        "rounds": 3, "task": "regression", "data": {"name": "npz", "path": str(tmp_path / "numbers.npz")},
        "model": {"name": "mlp", "hidden": [8]}, "local": {"steps": 4, "batch_size": 8, "lr": 0.05},
    }  # fmt: skip


def test_own_heads_are_compared_with_the_global_model(config: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = fedadc.run(config, out=run)
    (row,) = personalize(run, epochs=40, lr=0.05).rows
    figures = row.as_dict()
    assert figures["metric"] == "mse" and figures["gained"] == 1 and figures["lost"] == 0
    assert figures["personal_mean"] < 0.2 * figures["global_mean"]

    # recompute the figures with a module of its own, in units of the labels
    federation = result.plan.federation
    test, (target,) = federation.data.test, federation.data.targets
    assert test is not None
    module = MLP((3,), 1, hidden=(8,))
    with torch.no_grad():
        module.load_state_dict(fedadc.load(run).module.state_dict())
        outputs = target.center + target.spread * module(test.x.float()).double()
    squared = float(((outputs - test.y.double()) ** 2).sum())
    assert sum(total.shared or 0 for total in row.totals) == pytest.approx(squared, rel=1e-5)
    lines = list(csv.DictReader((run / "personal/clients.csv").open()))
    assert float(lines[2]["personal_mse"]) == pytest.approx(row.totals[2].own / row.totals[2].test)
    summary = json.loads((run / "personal/summary.json").read_text())
    assert summary["rows"] == [figures]
    assert set(personal_state_dict(run, 3, "none")) == set(module.state_dict())
    assert (run / "personal/personal.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("method", ["ditto", "fedper", "local_only"])
def test_models_that_the_method_stores(config: dict[str, Any], method: str, tmp_path: Path) -> None:
    fedadc.run({**config, "method": method, "rounds": 20}, out=tmp_path / "run")
    (row,) = personalize(tmp_path / "run").rows
    assert row.regularizer == "own" and row.figures().personal_cumulative is not None
    recorded = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    if method == "local_only":  # which records how good every client's model is on the samples of all
        assert row.figures().global_cumulative is None and row.figures().personal_cumulative < recorded[-1]["test_mse"]
    else:
        assert row.figures().personal_cumulative == pytest.approx(recorded[-1]["personal_mse"], rel=1e-6)


def test_what_needs_classes_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    fedadc.run(config, out=tmp_path / "run")
    with pytest.raises(FedadcError, match=r"confidence needs task: classification, but the task .* is regression"):
        personalize(tmp_path / "run", regularizers=["none", "confidence"])
    assert not (tmp_path / "run/personal").exists()
    digits = {"rounds": 1, "data": {"name": "digits", "clients": 3}, "model": {"name": "mlp", "hidden": [4]}}
    fedadc.run(digits, out=tmp_path / "digits")
    with pytest.raises(FedadcError, match=r"different tasks \(classification, regression\)"):
        personalize([tmp_path / "run", tmp_path / "digits"])
