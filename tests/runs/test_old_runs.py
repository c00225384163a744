"""Run directories of earlier versions are read, evaluated, personalized and resumed.

`v0.1.0` is a run of SCAFFOLD with an EMA, overlap and eight-bit uploads, written by version 0.1.0:
rounds: 3, digits, 6 clients, `sort` with 4 labels each, mlp [8], 4 steps of 16, cohort 3, checkpoint every round.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import fedadc
from commands import Call, contents, fine, records
from fedadc.errors import CannotResume, FedadcError

OLD = Path(__file__).parent / "v0.1.0"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(OLD, tmp_path / "run")


def test_compare_reads_it(call: Call, run: Path) -> None:
    (row,) = json.loads(fine(call("compare", run, "--json")))
    assert row["label"] == "scaffold" and row["seeds"] == 1
    assert row["value"] == pytest.approx(sum(r["test_accuracy"] for r in records(run)) / 3)


def test_evaluate_finds_the_recorded_accuracy(call: Call, run: Path) -> None:
    found = json.loads(fine(call("evaluate", run, "--json")))
    last = records(run)[-1]
    assert found["test"]["accuracy"] == pytest.approx(last["test_accuracy"], abs=0.01)
    assert found["ema test"]["accuracy"] == pytest.approx(last["ema_test_accuracy"], abs=0.01)
    assert contents(run) == contents(OLD)


def test_personalize_tunes_its_classifier(call: Call, run: Path) -> None:
    fine(call("personalize", run))
    summary = json.loads((run / "personal" / "summary.json").read_text())
    assert summary["rows"][0]["clients"] == 6


def test_resume_extends_it(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = fedadc.resume(run, "rounds=5")
    assert [r["round"] for r in result.history] == [1, 2, 3, 4, 5]
    assert records(run)[:3] == records(OLD)  # what it had is kept
    assert "fedadc 0.1.0 (now" in caplog.text  # the change of version is pointed out
    assert len(result.state.clients) >= 5


def test_resume_may_begin_to_measure_drift_and_changes_nothing_else(run: Path, tmp_path: Path) -> None:
    """The old config knows no evaluate.drift."""
    assert "drift" not in (OLD / "config.yaml").read_text()
    plain, measured = fedadc.resume(run, "rounds=5"), shutil.copytree(OLD, tmp_path / "measured")
    found = fedadc.resume(measured, ["rounds=5", "evaluate.drift=true"])
    drift = [{k: r.pop(k) for k in list(r) if k.startswith("drift")} for r in found.history]
    assert [sorted(names) for names in drift] == [[]] * 3 + [["drift_cosine", "drift_distance", "drift_spread"]] * 2
    for r in (*plain.history, *found.history):
        del r["seconds"]
    assert found.history == plain.history
    assert {name: v.tolist() for name, v in found.state_dict.items()} == {
        name: v.tolist() for name, v in plain.state_dict.items()
    }


def test_resume_with_other_settings_is_refused(run: Path) -> None:
    with pytest.raises(CannotResume, match=r"local\.lr 0\.1 \(now 0\.2\)"):
        fedadc.resume(run, ["rounds=5", "local.lr=0.2"])
    assert contents(run) == contents(OLD)


def test_an_old_run_is_not_measured_on_samples_that_it_was_trained_on(tmp_path: Path) -> None:
    """Versions before 0.3 held out other samples of natural clients."""
    rows = [f"{k % 3},{k},{(k * 7) % 5},{'a' if k % 2 else 'b'}" for k in range(60)]
    (tmp_path / "sites.csv").write_text("\n".join(["site,x,z,y", *rows]) + "\n")
    data = {"name": "csv", "path": str(tmp_path / "sites.csv"), "label": "y", "client": "site"}
    tree = {"rounds": 1, "data": data, "model": "logistic", "local": {"steps": 1}}
    fedadc.run(tree, out=tmp_path / "a")
    assert "test" in fedadc.evaluate(tmp_path / "a")
    facts = json.loads((tmp_path / "a/environment.json").read_text())
    (tmp_path / "a/environment.json").write_text(json.dumps({**facts, "fedadc": "0.2.0"}))
    for measure in (fedadc.evaluate, fedadc.personalize):
        with pytest.raises(FedadcError, match=r"trained by version 0\.2\.0, which held out other test samples"):
            measure(tmp_path / "a")
    assert "sites.csv" in fedadc.evaluate(tmp_path / "a", tmp_path / "sites.csv")


def test_options_that_data_and_model_have_got_since_have_their_defaults(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(60, 4)), y=np.arange(60) % 2)
    tree = {
        "rounds": 4, "data": {"name": "npz", "path": str(tmp_path / "data.npz"), "clients": 3},
        "model": {"name": "mlp", "hidden": [4]}, "local": {"steps": 2, "batch_size": 8, "lr": 0.1},
    }  # fmt: skip
    whole = fedadc.run(tree)
    fedadc.run(tree, out=tmp_path / "run", until=2)
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    for node, option in (("data", "merge_names"), ("data", "missing"), ("model", "projection")):
        config[node].pop(option)
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(CannotResume, match=r"data\.merge_names False \(now True\)"):
        fedadc.resume(tmp_path / "run", "data.merge_names=true")
    assert torch.equal(fedadc.resume(tmp_path / "run").state.theta, whole.state.theta)
