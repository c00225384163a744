"""The best model by validation data: it is the one of the best record, whatever happens to the run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fedadc
from fedadc.config.build import prepare
from fedadc.methods import FedAvg
from fedadc.runs.evaluate import evaluate
from fedadc.runs.layout import BEST_MODEL
from fedadc.runs.record import load_config, read_run, saved_model
from fedadc.runs.runner import resume, run
from snapshots import CONFIG, outcome, run_with_snapshots

BASE: dict[str, Any] = {
    **CONFIG,
    "rounds": 9,
    "data": {**CONFIG["data"], "validation": 0.2},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.5},
    "evaluate": {"every": 1},
}


def metadata(file: Path) -> str:
    with safe_open(file, "pt") as opened:
        return str(opened.metadata()["model"])


def best_record(out: Path, metric: str = "validation_accuracy", pick: Any = max) -> dict[str, Any]:
    found = read_run(out).records
    return next(r for r in found if r.get(metric) == pick(r[metric] for r in found if metric in r))


BY_LOSS = {"stop": {"metric": "validation_loss"}, "local": {**BASE["local"], "lr": 2.0}}


@pytest.mark.parametrize("changes", [{}, {"method": "feddyn"}, {"evaluate": {"every": 2, "overlap": True}}, BY_LOSS])
def test_it_is_the_model_of_the_best_round(changes: dict[str, Any], tmp_path: Path) -> None:
    """Against the state of a loop that keeps all of them."""
    config = load_config({**BASE, **changes})
    out = tmp_path / "a"
    result = run(config, out=out)
    metric, pick = ("validation_loss", min) if "stop" in changes else ("validation_accuracy", max)
    best = best_record(out, metric, pick)
    assert best["round"] < 9, "the last round would prove nothing"
    federation = prepare(config).federation
    states = {r.round: r.state for r in federation.rounds(9)}
    expected, found = federation.state_dict(states[best["round"]]), load_file(out / BEST_MODEL)
    assert expected.keys() == found.keys() and all(torch.equal(expected[k], found[k]) for k in found)
    assert metadata(out / BEST_MODEL) == f"best after round {best['round']}, {metric} {best[metric]!r}"
    assert result.best is not None and result.best.state_dict is not None
    assert (result.best.round, result.best.metric, result.best.value) == (best["round"], metric, best[metric])
    assert all(torch.equal(result.best.state_dict[k], found[k]) for k in found)
    in_memory = run(config).best
    assert in_memory is not None and in_memory.state_dict is not None and in_memory.round == best["round"]
    assert all(torch.equal(in_memory.state_dict[k], found[k]) for k in found)
    measured = evaluate(out)["best validation"]
    assert measured["accuracy"] == best["validation_accuracy"] and measured["loss"] == best["validation_loss"]
    assert fedadc.load(out, model="best").federation.model.state_dict(federation.agreement.start).keys() == found.keys()


def test_a_killed_run_ends_with_the_same_best_model(tmp_path: Path) -> None:
    out = tmp_path / "whole"
    run_with_snapshots(BASE, out, {2, 4, 6, 8})
    expected, best = outcome(out), best_record(out)["round"]
    assert {2, 4, 6, 8} & set(range(best, 9)) and {2, 4, 6, 8} & set(range(1, best)), "kills before and after the best"
    for killed in (2, 4, 6, 8):
        resume(tmp_path / f"after-{killed}")
        assert outcome(tmp_path / f"after-{killed}") == expected
    assert BEST_MODEL in expected["models"]


def test_a_damaged_checkpoint_does_not_change_it(tmp_path: Path) -> None:
    out = tmp_path / "whole"
    run_with_snapshots(BASE, out, {6})
    expected, cut = outcome(out), tmp_path / "after-6"
    (newest,) = (cut / "checkpoints").glob("round-00000006.safetensors")
    newest.write_bytes(newest.read_bytes()[:-3])
    resume(cut)
    assert outcome(cut) == expected


def test_prolonged_it_is_the_best_of_all_rounds(tmp_path: Path) -> None:
    long, short = tmp_path / "long", tmp_path / "short"
    run({**BASE, "rounds": 9}, out=long)
    run({**BASE, "rounds": 4}, out=short)
    resume(short, "rounds=9")
    assert (short / BEST_MODEL).read_bytes() == (long / BEST_MODEL).read_bytes()


def test_a_run_of_an_earlier_version_gets_none_unless_a_later_round_is_better(tmp_path: Path) -> None:
    """Its checkpoints have no best model, which only a round can bring that beats all records."""
    out = tmp_path / "a"
    run({**BASE, "checkpoint": {"every": 1, "best": False}}, out=out)
    best = best_record(out)["round"]
    assert best < 9 and not (out / BEST_MODEL).exists()
    resumed = resume(out, ["checkpoint.best=null", "rounds=11"])
    later = best_record(out)["round"]
    assert (out / BEST_MODEL).exists() == (later > 9) == (resumed.best is not None and resumed.best.kept is not None)
    again = tmp_path / "b"
    run({**BASE, "rounds": best, "checkpoint": {"every": 1, "best": False}}, out=again)
    resume(again, "checkpoint.best=true")  # its last round is the best one, so the model is there
    assert metadata(again / BEST_MODEL).startswith(f"best after round {best}, ")


def test_one_that_is_not_kept_any_more_is_not_left_behind(tmp_path: Path) -> None:
    out = tmp_path / "a"
    run({**BASE, "rounds": 4}, out=out)
    assert (out / BEST_MODEL).exists()
    save_file({"w": torch.ones(2)}, tmp_path / "own.safetensors")
    resume(out, ["checkpoint.best=false", "rounds=5"])
    assert not (out / BEST_MODEL).exists()
    shutil.copy(tmp_path / "own.safetensors", out / BEST_MODEL)  # not written by a run: it stays
    resume(out, ["rounds=6"])
    assert (out / BEST_MODEL).read_bytes() == (tmp_path / "own.safetensors").read_bytes()


def test_without_validation_data_nothing_is_added(tmp_path: Path) -> None:
    result = run({**CONFIG, "rounds": 2}, out=tmp_path / "a")
    assert result.best is None and not (tmp_path / "a" / BEST_MODEL).exists()
    manifest = json.loads(max((tmp_path / "a/checkpoints").glob("*.json")).read_text())["manifest"]
    with safe_open(tmp_path / f"a/checkpoints/round-{manifest['round']:08d}.safetensors", "pt") as opened:
        assert not [name for name in opened.keys() if name.startswith("best")]  # noqa: SIM118


class NamesOneBest(FedAvg):
    """A user's method whose second model has the name of the best one."""

    def evaluated(self, theta: Any, server: Any) -> Any:
        return {"global": theta, "best": theta}


def test_a_method_with_a_model_of_this_name_is_refused() -> None:
    config = load_config(BASE)
    with pytest.raises(fedadc.FedadcError, match="NamesOneBest has a model 'best', the name of the best one"):
        prepare(replace(config, method=NamesOneBest()))
    assert prepare(replace(load_config({**BASE, "checkpoint": {"best": False}}), method=NamesOneBest()))


def test_the_file_is_found_by_name_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(BASE, out=tmp_path / "a")
    assert saved_model(read_run(tmp_path / "a"), "best") == tmp_path / "a" / BEST_MODEL
    assert not [r for r in caplog.records if "was saved after round" in r.getMessage()]
