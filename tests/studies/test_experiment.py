"""Experiments: equal budgets, choice by validation data, finished runs are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from family import OBJECTIVES_OF_CLASSES
from fedadc.analysis.compare import final
from fedadc.cli.terminal import choices_table
from fedadc.config.presets import PRESETS
from fedadc.config.yaml import read_yaml
from fedadc.errors import FedadcError
from fedadc.methods import METHODS
from fedadc.runs.record import load_config, read_run
from fedadc.selections import SELECTIONS, Uniform
from fedadc.studies.experiment import Choice, Trial, check_rows, choose, read_experiment, train_trials
from fedadc.studies.queue import finished

SMALL: dict[str, Any] = {
    "title": "small",
    "seeds": [0, 1],
    "budget": 2,
    "base": {
        "rounds": 3,
        "data": {"name": "digits", "clients": 10, "validation": 0.2},
        "model": {"name": "mlp", "hidden": [8]},
        "local": {"steps": 3, "batch_size": 8, "lr": 0.1},
        "cohort": {"size": 3},
    },
    "runs": {
        "FedAvg": {"grid": {"local.lr": [1e-5, 0.2]}},
        "FedADC, wild": {"set": {"method": "fedadc"}, "grid": {"local.lr": [0.1, 1e25]}},
    },
}


def written(folder: Path, tree: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def train(trials: list[Trial], out: Path, jobs: int = 1) -> set[str]:
    return train_trials(trials, out, jobs)


def unfinished(trials: list[Trial], out: Path) -> list[Trial]:
    done = {job.path for job in finished([trial.job(out) for trial in trials])}
    return [trial for trial in trials if out / trial.folder not in done]


def test_the_best_on_validation_data_is_chosen_and_finished_runs_are_kept(tmp_path: Path) -> None:
    plan, trials = read_experiment(written(tmp_path, SMALL))
    assert len(trials) == 2 * 2 * 2 and len({t.folder for t in trials}) == len(trials)
    failed = train(trials, tmp_path / "out", 2)
    assert len(failed) == 2
    average, wild = choose(plan, trials, tmp_path / "out", failed)
    assert average.setting == {"local.lr": 0.2} and wild.setting == {"local.lr": 0.1}
    assert wild.scores[1] == ({"local.lr": 1e25}, None)  # diverged
    for choice in (average, wild):
        assert [r.tree["seed"] for r in choice.runs] == [0, 1]
        mean = sum(final(r, "validation_accuracy") for r in choice.runs) / 2
        assert dict(choice.scores[0][0]).keys() == {"local.lr"}
        assert mean == pytest.approx(max(score for _, score in choice.scores if score is not None))

    assert {t.folder for t in unfinished(trials, tmp_path / "out")} == failed


def test_an_unfinished_or_changed_run_is_trained_again(tmp_path: Path) -> None:
    tree = {**SMALL, "runs": {"FedAvg": SMALL["runs"]["FedAvg"]}}
    _, trials = read_experiment(written(tmp_path, tree))
    train(trials, tmp_path / "out")
    metrics = tmp_path / "out" / trials[0].folder / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text("".join(whole.splitlines(keepends=True)[:-1]))  # as if the process had been killed
    train(trials, tmp_path / "out")
    again = [{**json.loads(line), "seconds": 0} for line in metrics.read_text().splitlines()]
    assert again == [{**json.loads(line), "seconds": 0} for line in whole.splitlines()]
    tree["base"] = {**SMALL["base"], "rounds": 4}
    _, longer = read_experiment(written(tmp_path, tree))
    assert not {t.folder for t in longer} & {t.folder for t in trials}
    (tmp_path / "out" / trials[1].folder / "model.safetensors").unlink()
    assert unfinished(trials, tmp_path / "out") == [trials[1]]


def test_a_run_of_an_experiment_equals_a_run_of_its_config(tmp_path: Path) -> None:
    from fedadc.runs.runner import run

    _, trials = read_experiment(written(tmp_path, SMALL))
    train(trials[:1], tmp_path / "out")
    recorded = read_run(tmp_path / "out" / trials[0].folder).records
    assert [replace_seconds(r) for r in recorded] == [replace_seconds(r) for r in run(trials[0].config).history]


def replace_seconds(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "seconds": 0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget": 3}, r"runs\.FedAvg\.grid has 2 settings, but the budget is 3"),
        ({"choose_by": "test_accuracy"}, "never chosen on test data"),
        ({"seeds": []}, "at least one seed"),
        ({"seeds": [1, 1]}, "twice"),
        ({"runs": {}}, "at least one method"),
        ({"runs": {"A": {"gird": {}}}}, r"runs\.A: key 'gird' is unknown; did you mean 'grid'"),
        ({"runs": {"A": {"grid": {"local.lr": [0.1, "fast"]}}}}, r"local\.lr"),
        ({"runs": {"A": {"grid": {"local.rl": [0.1, 0.2]}}}}, "did you mean 'lr'"),
        ({"runs": {"A": {"grid": {"local.lr": [0.1, 0.1]}}}}, r"runs\.A\.grid has the setting .* twice"),
        ({"base": {**SMALL["base"], "data": {"name": "digits", "clients": 9}}}, "has no validation data"),
        ({"base": {"rounds": 3}}, r"data is missing"),
        ({"choose_by": "validation_top5"}, r"validation_top5 is not measured by runs\.FedAvg"),
        ({"target": 5}, "target must be a share"),
        ({"rounds": 5}, "is the config of one run"),
        ({"runs": {"—": {"grid": {"local.lr": [0.1, 0.2]}}}}, "no letter or digit"),
        ({"bugdet": 3}, "did you mean 'budget'"),
    ],
)  # fmt: skip
def test_bad_experiments_are_refused_before_anything_runs(tmp_path: Path, change: Any, words: str) -> None:
    with pytest.raises(FedadcError, match=words):
        read_experiment(written(tmp_path, {**SMALL, **change}))


def test_grids_of_different_sizes_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {"A": {"grid": {"local.lr": [0.1, 0.2, 0.3]}}, "B": {"grid": {"local.lr": [0.1, 0.2]}}}
    tree = {**SMALL, "seeds": [0], "runs": runs}
    with pytest.raises(FedadcError, match=r"runs\.A\.grid has 3 settings, but the budget is 2 .* equal_budgets: false"):
        read_experiment(written(tmp_path, tree))
    del tree["budget"]
    with pytest.raises(FedadcError, match="budget is missing; write how many settings"):
        read_experiment(written(tmp_path, tree))
    _, trials = read_experiment(written(tmp_path, {**tree, "equal_budgets": False}))
    assert [t.label for t in trials] == ["A"] * 3 + ["B"] * 2
    scores = [({"local.lr": lr}, 0.5) for lr in (0.1, 0.2, 0.3)]
    choices_table([Choice("A", {}, scores, []), Choice("B", {}, scores[:2], [])], "validation_accuracy")
    told = capsys.readouterr().out
    assert "budgets differ: * fewer settings than other runs, which tried 3" in " ".join(told.split())
    assert "│        3 │" in told and "│      2 * │" in told
    choices_table([Choice("A", {}, scores, []), Choice("B", {}, scores, [])], "validation_accuracy")
    assert "budgets differ" not in capsys.readouterr().out


def test_a_choice_at_the_edge_of_its_grid_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = {"local.lr": [1e-5, 0.2], "model.hidden": [[8]], "local.batch_size": [8]}
    plan, trials = read_experiment(written(tmp_path, {**SMALL, "seeds": [0], "runs": {"A": {"grid": grid}}}))
    (choice,) = choose(plan, trials, tmp_path / "out", train(trials, tmp_path / "out"))
    assert choice.edges == ["the best local.lr, 0.2, stands at the edge of its grid, 1e-05 to 0.2; try larger values"]
    choices_table([choice], plan.choose_by)
    assert "note: A: the best local.lr, 0.2, stands at the edge" in capsys.readouterr().err


def test_two_labels_never_share_a_folder(tmp_path: Path) -> None:
    same = SMALL["runs"]["FedAvg"]
    with pytest.raises(FedadcError, match="share the folder"):
        read_experiment(written(tmp_path, {**SMALL, "runs": {"Fed Avg": same, "fed-avg": same}}))


def test_an_invalid_row_is_refused_before_anything_runs(tmp_path: Path) -> None:
    tree = {**SMALL, "seeds": [0], "runs": {"A": {"grid": {"cohort.size": [11, 12]}}}}
    _, trials = read_experiment(written(tmp_path, tree))
    with pytest.raises(FedadcError, match=r"runs\.A: cohort\.size is 11"):
        check_rows(trials, None)


def test_a_row_whose_settings_all_diverge_is_reported_beside_the_others(tmp_path: Path) -> None:
    wild = {"set": {"local": {"lr": 1e25}}, "grid": {"local.batch_size": [4, 8]}}
    tree = {**SMALL, "seeds": [0], "runs": {"FedAvg": SMALL["runs"]["FedAvg"], "Wild": wild}}
    plan, trials = read_experiment(written(tmp_path, tree))
    average, none = choose(plan, trials, tmp_path / "out", train(trials, tmp_path / "out"))
    assert average.runs and not none.runs and none.described() == "all diverged"
    assert replace(average, setting={}).described() == "as given"  # a row without a grid


def test_a_folder_that_cannot_be_written_is_no_divergence(tmp_path: Path) -> None:
    _, trials = read_experiment(written(tmp_path, SMALL))
    place = tmp_path / "out" / trials[0].folder
    place.mkdir(parents=True)
    (place / "thesis.txt").write_text("years of work")
    with pytest.raises(FedadcError, match=r"contains thesis\.txt"):
        train(trials, tmp_path / "out", 2)
    assert len(unfinished(trials, tmp_path / "out")) == 1 + 2  # this one, and the two that diverge


def test_a_second_experiment_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    from fedadc.system.files import folder_lock

    written(tmp_path, SMALL)
    words = [sys.executable, "-m", "fedadc", "experiment", "small.yaml", "--out", "out"]
    with folder_lock(tmp_path / "out"):
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "another process is writing to out" in done.stderr


def test_grid_values_may_be_lists(tmp_path: Path) -> None:
    tree = {**SMALL, "seeds": [0], "runs": {"A": {"grid": {"model.hidden": [[4], [8, 8]]}}}}
    plan, trials = read_experiment(written(tmp_path, tree))
    failed = train(trials, tmp_path / "out")
    (choice,) = choose(plan, trials, tmp_path / "out", failed)
    assert choice.setting["model.hidden"] in ([4], [8, 8]) and not failed


def test_a_bug_in_a_users_method_ends_only_its_own_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import fedadc\nclass Buggy(fedadc.methods.FedAvg):\n  def step(self, theta, grad, local): return 1 / 0\n"
    )
    buggy = {"set": {"method": "mine:Buggy"}, "grid": {"local.lr": [0.1, 0.2]}}
    _, trials = read_experiment(written(tmp_path, {**SMALL, "runs": {**SMALL["runs"], "B": buggy}}))
    with pytest.raises(FedadcError, match="ZeroDivisionError"):
        train(trials, tmp_path / "out", 2)
    assert len(unfinished(trials, tmp_path / "out")) == 4 + 2  # the buggy ones and the two that diverge


EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_the_shipped_experiment_is_valid_and_has_every_method() -> None:
    plan, trials = read_experiment(EXPERIMENTS / "digits.yaml")
    personal = {"fedper", "fedrep", "fedbn", "fedbabu", "ditto"}  # methods for personal models, not for a global one
    later = {"fednova"}  # newer than the published results of this experiment
    assert {type(t.config.method) for t in trials} == {METHODS[name] for name in METHODS.keys() - personal - later}
    assert {type(t.config.objective) for t in trials} == set(OBJECTIVES_OF_CLASSES.values())
    assert plan.budget == 12 and plan.seeds == [0, 1, 2]
    assert {"local only", "centralized", "FedAvg, local momentum", "FedADC heavy-ball"} <= plan.runs.keys()
    assert len(trials) == len(plan.runs) * 12 * 3


@pytest.mark.parametrize("name", ["data-aware", "data-aware-cifar10"])
def test_the_shipped_selections_are_compared_with_all_else_equal(name: str) -> None:
    plan, trials = read_experiment(EXPERIMENTS / f"{name}.yaml")
    assert len(plan.runs) % 3 == 0 and len(trials) == len(plan.runs) * len(plan.seeds)
    for start in range(0, len(plan.runs), 3):
        labels = list(plan.runs)[start : start + 3]
        first = [next(t.config for t in trials if t.label == label) for label in labels]
        assert [type(c.cohort.selection) for c in first] == list(SELECTIONS.values())
        alike = [replace(c, label=None, cohort=replace(c.cohort, selection=Uniform())) for c in first]
        assert alike[0] == alike[1] == alike[2]


def test_the_shipped_comparison_of_drift_differs_in_the_method_only() -> None:
    plan, trials = read_experiment(EXPERIMENTS / "drift.yaml")
    assert plan.choose_by == "validation_accuracy" and len(trials) == 4 * len(plan.seeds) >= 12
    assert all(t.config.evaluate.drift for t in trials)
    first = [next(t.config for t in trials if t.label == label) for label in plan.runs]
    assert [getattr(c.method, "beta", None) for c in first] == [None, 0.9, 0.9, 0.9]
    assert len({repr(c.method) for c in first}) == 4
    alike = [replace(c, label=None, method=first[0].method) for c in first]
    assert alike[0] == alike[1] == alike[2] == alike[3]


def test_drift_is_nothing_to_choose_by(tmp_path: Path) -> None:
    base = {**SMALL["base"], "evaluate": {"drift": True}}
    with pytest.raises(FedadcError, match=r"choose_by: drift_spread is not measured by .*; it measures validation_acc"):
        read_experiment(written(tmp_path, {**SMALL, "base": base, "choose_by": "drift_spread"}))


CONFIGS = [p for p in EXPERIMENTS.glob("*.yaml") if not {"runs", "search"} & read_yaml(p).keys()]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
@pytest.mark.parametrize("preset", PRESETS)
def test_shipped_configs_take_every_preset(path: Path, preset: str) -> None:
    assert load_config(path, presets=[preset]).rounds == 500
