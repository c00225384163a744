"""Personal models of a regression: compared by the mean squared error, where less is better."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import fedadc
from fedadc.cli import terminal
from fedadc.errors import FedadcError
from fedadc.fields.summary import short_number
from fedadc.models import MLP
from fedadc.personal.folder import personal_state_dict
from fedadc.personal.personalize import personalize
from fedadc.personal.results import ClientTotal, ResultRow
from fedadc.tasks import Regression

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
    by_name, by_number = personal_state_dict(run, "3", "none"), personal_state_dict(run, 3, "none")
    assert all(torch.equal(by_name[name], by_number[name]) for name in by_number)
    with pytest.raises(FedadcError, match="client must be a number, not 'nobody'"):
        personal_state_dict(run, "nobody")
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


def test_new_data_of_clients_that_were_dealt(config: dict[str, Any], tmp_path: Path) -> None:
    """Their test shares are dealt by strata, of which a regression has one."""
    arrays = np.load(tmp_path / "numbers.npz")
    np.savez(tmp_path / "plain.npz", x=arrays["x"], y=arrays["y"])
    data = {"name": "npz", "path": str(tmp_path / "plain.npz"), "clients": 6}
    fedadc.run({**config, "data": data}, out=tmp_path / "run")
    (tmp_path / "changed.yaml").write_text("data: {seed: 5}\n")
    rows = personalize(tmp_path / "run", data=tmp_path / "changed.yaml").rows
    assert [row.phase for row in rows] == ["before", "after", "recalibrated"]
    assert all(row.figures().tested == 6 for row in rows)


def test_large_errors_are_shown_whole_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "out", Console(width=80))
    totals = [ClientTotal(k, str(k), 10, 7, 9.793e7 * (k + 1), 1.368e8 * (k + 1)) for k in range(5)]
    rows = [ResultRow("stays", name, phase, totals, Regression) for name in ("none", "prox") for phase in ("", "after")]
    terminal.personal_table(rows)
    lines = capsys.readouterr().out.splitlines()
    found = rows[0].figures()
    text = " ".join(lines)
    assert max(map(len, lines)) <= 80 and "recalibrated" not in text and text.count("after") == 2
    for value in (found.global_mean, found.personal_mean, found.personal_std, found.global_cumulative):
        assert value is not None and f"{value:.2e}".replace("e+0", "e") in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0.0000"), (-3.14159, "-3.1416"), (1.1295e17, "1.130e17"), (-1e5, "-1.000e5"), (float("nan"), "nan")],
)
def test_short_numbers(value: float, shown: str) -> None:
    assert short_number(value) == shown
