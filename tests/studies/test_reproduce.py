"""`fedadc reproduce`: plans, real runs on digits, verdicts, budgets, and mistakes of its user."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

import fedadc
from commands import Call, fine, refused
from fedadc.analysis.compare import final
from fedadc.errors import FedadcError
from fedadc.runs.record import read_run
from fedadc.studies.estimate import Estimate
from fedadc.studies.paper.designs import DESIGNS
from fedadc.studies.paper.scales import AS_PUBLISHED, ON_DIGITS, ON_LAPTOP
from fedadc.studies.plan import TUNING_SEED, plan_of
from fedadc.studies.reproduce import _Study, dry_run, reproduce

EXPERIMENT = Path(__file__).parents[2] / "experiments/drift.yaml"
TINY = replace(
    ON_DIGITS,
    changes={
        name: {**changes, "rounds": 4, "model": {"name": "mlp", "hidden": [8]}, "local.steps": 2, "local.epochs": None}
        for name, changes in ON_DIGITS.changes.items()
    },
)


def test_a_plan_trains_the_most_important_rows_first() -> None:
    plan = plan_of("fig1", AS_PUBLISHED)
    assert len(plan.rows) == 12 and {row.row.label for row in plan.rows[:3]} == {"FedADC Nesterov"}
    assert [row.row.label for row in plan.in_order()][:4] == [
        "FedAvg",
        "SlowMo",
        "FedADC heavy-ball",
        "FedADC Nesterov",
    ]
    tuning = plan.tuning_runs(Path("out"))
    assert len(tuning) == 3 * (3 * 16 + 4) and {run.seed for run in tuning} == {TUNING_SEED}
    assert all(run.job.config.data.validation == 0.05 for run in tuning)
    final_runs = plan.final_runs(Path("out"), {row.key: {} for row in plan.rows})
    assert [run.seed for run in final_runs] == [seed for seed in range(10) for _ in range(12)]
    assert all(run.job.config.data.validation is None for run in final_runs)
    assert len({run.job.path for run in tuning + final_runs}) == len(tuning) + len(final_runs)


def test_designs_share_their_runs() -> None:
    def paths(name: str) -> set[Path]:
        plan = plan_of(name, ON_DIGITS)
        runs = plan.final_runs(Path("out"), {row.key: row.settings()[0] for row in plan.rows})
        return {run.job.path for run in runs + plan.tuning_runs(Path("out"))}

    assert paths("fig1") == paths("fig1-s2") | paths("fig1-s3") | paths("fig1-s4") and paths("fig2") < paths("fig1")
    assert paths("fig3") | paths("fig4") == paths("table1")
    assert paths("table1-c10-c01") < paths("fig3")


def test_a_scale_says_line_by_line_what_it_changes() -> None:
    assert plan_of("fig1-s2", AS_PUBLISHED).changes() == []
    assert "weight decay" in plan_of("table1", AS_PUBLISHED).changes()[0]
    assert plan_of("fig1-s2", AS_PUBLISHED, range(2)).changes() == ["seeds: 2 instead of 10"]
    laptop = plan_of("fig1-s2", ON_LAPTOP).changes()
    assert "rounds: 100 instead of 500" in laptop and "model.width: 0.25 instead of 1.0" in laptop
    nesterov = (
        "FedADC Nesterov: local.lr 0.015, method.beta 0.95 instead of searching local.lr [0.01, 0.025, 0.05, 0.1]"
    )
    assert any(line.startswith(nesterov) for line in laptop)
    assert "data.name: digits instead of cifar10" in plan_of("table1", ON_DIGITS).changes()


def test_a_setting_is_chosen_by_validation_data_and_the_result_is_trained_on_all_data(tmp_path: Path) -> None:
    result = reproduce("fig1-s2", scale=TINY, out=tmp_path, only=["fedavg", "SlowMo"], seeds=range(2))
    assert {row.label for row in result.rows} == {"FedAvg", "SlowMo"} and not result.failed
    for row in result.rows:
        tried = result.scores["s2", row.label]
        assert len(tried) == 6
        assert row.setting == max(tried, key=lambda one: one[1] or 0)[0]
        slug = row.label.lower()
        chosen = [read_run(path.parent) for path in tmp_path.glob(f"runs/{slug}/*/metrics.jsonl")]
        assert {run.tree["local"]["lr"] for run in chosen} == {row.setting["local.lr"]} and len(chosen) == 2
        assert row.values["final"] == {run.tree["seed"]: final(run, "test_accuracy") for run in chosen}
        tuned = [read_run(path.parent) for path in tmp_path.glob(f"tuning/{slug}/*/metrics.jsonl")]
        scores = {run.tree["local"]["lr"]: final(run, "validation_accuracy") for run in tuned if slug == "fedavg"}
        assert slug != "fedavg" or scores == {setting["local.lr"]: score for setting, score in tried}
    better, slow = result.claims
    assert better.reason == "0 paired seeds, and 4 are needed" and slow.reason == "2 paired seeds, and 4 are needed"
    part = "fig1-s2-fedavg-slowmo-seeds-0-1"  # no result of the whole is replaced
    written = json.loads((tmp_path / f"{part}.json").read_text())
    assert [row["label"] for row in written["rows"]] == ["FedAvg", "SlowMo"] and written["seconds"] > 0
    assert "| SlowMo improves on FedAvg | – |" in (tmp_path / f"{part}.md").read_text()
    assert (tmp_path / f"{part}.png").stat().st_size > 10_000

    again = reproduce("fig1-s2", scale=TINY, out=tmp_path, only=["fedavg", "SlowMo"], seeds=range(2))
    assert again.seconds == 0 and again.rows == result.rows  # nothing was trained again


@pytest.mark.slow
def test_a_calibration_follows_the_training_of_figure_7(tmp_path: Path) -> None:
    result = reproduce("fig7", scale=TINY, out=tmp_path)
    (row,) = result.rows
    for kind in ("none", "prox", "confidence"):
        assert len(row.values[f"gain of {kind}"]) == 5
    summaries = list(tmp_path.glob("runs/*/*/personal/summary.json"))
    before = [file.stat().st_mtime_ns for file in summaries]
    assert len(summaries) == 5 and len(result.claims[0].statements) == 3
    reproduce("fig7", scale=TINY, out=tmp_path)
    assert [file.stat().st_mtime_ns for file in summaries] == before


@pytest.mark.slow
def test_overlap_hides_the_download_of_the_momentum(tmp_path: Path) -> None:
    longer = {name: {**changes, "rounds": 30} for name, changes in TINY.changes.items()}
    result = reproduce("overlap", scale=replace(TINY, changes=longer), out=tmp_path)
    assert [str(judged.verdict) for judged in result.claims] == ["holds", "holds"]
    headings, _ = next(table for _, table in result.tables())
    assert headings == ["method", "seeds", "accuracy %", "virtual s"]


def test_what_does_not_fit_the_budget_is_not_run(tmp_path: Path) -> None:
    result = reproduce("covering", scale=TINY, out=tmp_path, budget=1e-6, seeds=range(1))
    assert [row.problem for row in result.rows] == ["1 not run", "1 not run"] and not (tmp_path / "runs").exists()
    _, (headings, cells) = next(iter(result.tables()))
    assert headings[2] == "accuracy %" and [line[1:3] for line in cells] == [["0 (1 not run)", "–"]] * 2
    assert not (tmp_path / "covering-seeds-0.png").exists()
    tuned = reproduce("fig1-s2", scale=TINY, out=tmp_path, only="FedAvg", budget=1e-6, seeds=range(1))
    assert {row.problem for row in tuned.rows} == {"1 not run"} and not (tmp_path / "tuning").exists()


@pytest.mark.slow
def test_finished_runs_are_in_the_result_whatever_the_budget_is(tmp_path: Path) -> None:
    whole = reproduce("fig1-s2", scale=TINY, out=tmp_path, only="FedAvg", seeds=range(1))
    again = reproduce("fig1-s2", scale=TINY, out=tmp_path, only="FedAvg", seeds=range(1), budget=1e-9)
    assert again.rows == whole.rows and again.rows[0].mean("final") and again.file("png").is_file()
    _, costs = dry_run("fig1-s2", scale=TINY, out=tmp_path, only="FedAvg", seeds=range(2), budget=1e-9)
    assert [(cost.runs, cost.fit) for cost in costs] == [(1, 0)]
    _, costs = dry_run("fig1-s2", scale=TINY, out=tmp_path / "new", only="FedAvg", seeds=range(2), budget=1.0)
    assert [(cost.runs, cost.fit) for cost in costs] == [(6, 6), (2, 2)]


@pytest.mark.slow
def test_a_budget_is_for_whole_rows_the_most_important_first(tmp_path: Path) -> None:
    """A grid of which only a part fits would be of no use, and results come before the tuning of other rows."""
    study = _Study(plan_of("fig1-s2", TINY, range(2)), tmp_path, jobs=1, deadline=time.monotonic() + 1000)
    each = {"FedADC Nesterov": 1.0, "SlowMo": 300.0, "FedAvg": 1.0, "FedADC heavy-ball": 1.0}  # seconds of a run
    study.costs = {
        (row.key, tuning): Estimate(0, 0, 0, 0, each[row.row.label])
        for row in study.plan.rows
        for tuning in (True, False)
    }
    study.train_by_importance()
    trained = [(run.row.row.label, run.tuning, run.seed) for run, _ in study.outcomes]
    assert "SlowMo" not in {label for label, _, _ in trained}  # its 6 settings and a result take 2100 s
    nesterov = [("FedADC Nesterov", True, TUNING_SEED)] * 6 + [("FedADC Nesterov", False, 0)]
    average = [("FedAvg", True, TUNING_SEED)] * 6 + [("FedAvg", False, 0)]
    assert trained[:7] == nesterov and trained[7:14] == average
    assert {seed for _, tuning, seed in trained[-3:] if not tuning} == {1}


def test_a_foreign_run_is_named_and_the_others_are_trained(tmp_path: Path) -> None:
    plan = plan_of("covering", TINY, range(1))
    runs = plan.final_runs(tmp_path, {row.key: {} for row in plan.rows})
    foreign = runs[0].job.path
    fedadc.run(runs[0].job.config, ["seed=7"], out=foreign)
    before = {file: file.read_bytes() for file in foreign.rglob("*") if file.is_file()}
    result = reproduce("covering", scale=TINY, out=tmp_path, seeds=range(1))
    assert [outcome.job.path for outcome in result.failed] == [foreign]
    assert "was started with other settings" in result.failed[0].message
    assert {row.label: row.problem for row in result.rows} == {
        "FedADC, covering cohorts": "1 failed",
        "FedADC, uniform cohorts": "",
    }
    assert {file: file.read_bytes() for file in foreign.rglob("*") if file.is_file()} == before


def test_a_dry_run_estimates_what_is_left(tmp_path: Path) -> None:
    _, costs = dry_run("covering", scale=TINY, out=tmp_path)
    assert [cost.runs for cost in costs] == [5, 5] and all(cost.each.seconds > 0 for cost in costs)
    assert not list(tmp_path.iterdir())
    reproduce("covering", scale=TINY, out=tmp_path, only="FedADC, covering cohorts", seeds=range(2))
    _, costs = dry_run("covering", scale=TINY, out=tmp_path)
    assert {cost.label: cost.runs for cost in costs} == {"FedADC, covering cohorts": 3, "FedADC, uniform cohorts": 5}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fig1-s5"], "figure or table 'fig1-s5' is unknown; did you mean 'fig1-s"),
        (["fig1-s2", "--scale", "digit"], "did you mean 'digits'"),
        (["fig1-s2", "--only", "FedAvgg"], "did you mean 'fedavg'"),
        (["fig1-s2", "--seeds", "1000,1"], "seed 1000 chooses the settings"),
        (["fig1-s2", "--device", "cuda"], "this machine has no CUDA device"),
        (["fig1-s2", "--dry-run", "--budget", "-1"], "--budget must be a number of hours above 0"),
        (["fig1-s2", "--seeds", "two"], "--seeds must be a number of seeds such as 3, or seeds such as 0,1,2"),
        (["fig1-s2", "--seeds", "0"], "--seeds must name at least one seed"),
        (["fig1-s2", "--seeds", "1,1"], "--seeds must not name a seed twice"),
        (["fig1-s2", "--budget", "-1"], "--budget must be a number of hours above 0"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_in_a_sentence(call: Call, tmp_path: Path, words: list[str], sentence: str) -> None:
    refused(call("reproduce", *words), sentence)
    assert [file.name for file in tmp_path.iterdir()] == ["small.yaml"]


def test_a_file_is_no_folder_for_runs(call: Call, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for words in (["reproduce", "covering"], ["experiment", str(EXPERIMENT)]):
        refused(call(*words, "--out", "thesis.txt"), "thesis.txt is not a folder; choose another --out")
    refused(call("reproduce", "covering", "--out", "/proc/runs"), "cannot write to /proc/runs", code=4)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_absent_data_is_named_with_what_needs_none(call: Call) -> None:
    words = ["reproduce", "fig1-s2", "--scale", "laptop", "--data-dir", "nothing"]
    printed = refused(call(*words), code=5)
    assert "fedadc data get cifar10" in printed and "--scale digits needs no download" in printed


def test_without_a_name_all_figures_and_tables_are_listed(call: Call) -> None:
    printed = fine(call("reproduce"))
    assert all(name in printed for name in DESIGNS)


def test_an_unknown_name_is_refused_in_python() -> None:
    with pytest.raises(FedadcError, match="did you mean 'table1'"):
        fedadc.reproduce("tabel1")


@pytest.mark.slow
def test_every_name_runs_on_digits(tmp_path: Path) -> None:
    for name, design in DESIGNS.items():
        result = reproduce(name, scale=replace(TINY, grids=""), out=tmp_path, seeds=range(1))
        assert not result.failed and all(row.values["final"] for row in result.rows), name
        assert len(result.claims) == len(design.claims)
        assert result.file("png").is_file()
