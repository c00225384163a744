"""Sweeps: the choice by validation data, exact repetition after real kills, what is refused before anything runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedadc
from commands import Call, contents, fine, refused
from fedadc.analysis.compare import final
from fedadc.errors import DataError, FedadcError
from fedadc.runs.record import read_run
from fedadc.studies.space import parse_searches
from fedadc.studies.sweep import SweepResult
from fedadc.studies.sweep_plan import claim_folder, read_sweep
from fedadc.studies.trial_file import SweepTrial
from fedadc.system.files import checksum, folder_lock

SMALL: dict[str, Any] = {
    "rounds": 4,
    "data": {"name": "digits", "clients": 6, "validation": 0.2},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "fedadc"},
    "local": {"steps": 2, "batch_size": 8, "lr": 0.1},
    "cohort": {"size": 2},
}
GRID = {"local.lr": [1e-5, 0.3, 1e25], "method.beta": [0.9]}


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    """Three settings with two seeds; the last one diverges."""
    out = tmp_path_factory.mktemp("grid") / "out"
    return fedadc.sweep(SMALL, GRID, seeds=[0, 1], out=out, jobs=2)


def test_the_best_on_validation_data_is_chosen_and_test_figures_stand_beside(grid: SweepResult) -> None:
    assert [t.settings["local.lr"] for t in grid.trials] == GRID["local.lr"]
    assert [t.state for t in grid.trials] == ["finished", "finished", "diverged"]
    for trial in grid.trials[:2]:
        runs = [read_run(grid.out / f"trial-{trial.trial:04d}/seed{seed}") for seed in (0, 1)]
        for metric in ("validation_accuracy", "test_accuracy"):
            assert trial.values[metric] == [final(run, metric) for run in runs]
        assert trial.score == sum(trial.values["validation_accuracy"]) / 2
        assert [run.tree["seed"] for run in runs] == [0, 1]
    assert grid.best == grid.trials[1] and (grid.trials[1].score or 0) > (grid.trials[0].score or 0)
    choice = json.loads((grid.out / "choice.json").read_text())
    assert choice["chosen"]["settings"] == {"local.lr": 0.3, "method.beta": 0.9}
    assert choice["trials"] == {"finished": 2, "pruned": 0, "diverged": 1}
    assert grid.edges == [] and grid.no_importance == "only one key is swept"
    assert [t.trial for t in grid.ranked()] == [1, 0, 2]
    assert (grid.out / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert repr(grid).count("\n") <= 2 and "lr=0.3 beta=0.9" in repr(grid)


def test_a_run_of_a_sweep_is_a_run_of_its_config(grid: SweepResult) -> None:
    alone = fedadc.run(SMALL, ["local.lr=0.3", "method.beta=0.9", "seed=1"]).history
    recorded = read_run(grid.out / "trial-0001/seed1").records
    assert [{**r, "seconds": 0} for r in recorded] == [{**r, "seconds": 0} for r in alone]


def test_a_finished_sweep_is_kept_and_compare_reads_its_folder(grid: SweepResult) -> None:
    before = contents(grid.out)
    notes: list[str] = []
    again = fedadc.sweep(SMALL, GRID, seeds=[0, 1], out=grid.out, notes=notes.append)
    assert again == grid and notes == [f"{grid.out}: 3 of 3 trials are kept"]
    after = contents(grid.out)
    assert {name for name in before if before[name] != after[name]} <= {"heatmap.png"}
    labels = [row.label for row in fedadc.compare(grid.out, metric="validation_accuracy")]
    assert labels[:2] == ["fedadc lr=1e-05", "fedadc lr=0.3"]


def test_a_test_metric_cannot_change_the_choice(grid: SweepResult, tmp_path: Path) -> None:
    """Test figures turned upside down in every record: the same choice."""
    out = tmp_path / "out"
    fedadc.sweep(SMALL, GRID, seeds=[0, 1], out=out, jobs=2)
    (out / "trials.jsonl").unlink()
    for metrics in out.glob("*/*/metrics.jsonl"):
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        lines = [json.dumps({**r, "test_accuracy": 1 - (r["test_accuracy"] or 0.0)}) + "\n" for r in records]
        metrics.write_text("".join(lines))
    again = fedadc.sweep(SMALL, GRID, seeds=[0, 1], out=out, jobs=2)
    assert grid.best is not None and again.best is not None and again.best.trial == grid.best.trial
    assert again.best.score == grid.best.score
    assert again.best.values["test_accuracy"] != grid.best.values["test_accuracy"]

    (out / "trials.jsonl").unlink()  # a run whose validation figures are not finite, though it was not stopped
    overflown = out / "trial-0001/seed1/metrics.jsonl"
    records = [json.loads(line) for line in overflown.read_text().splitlines()]
    overflown.write_text("".join(json.dumps({**r, "validation_accuracy": None}) + "\n" for r in records))
    last = fedadc.sweep(SMALL, GRID, seeds=[0, 1], out=out, jobs=2)
    assert [t.state for t in last.trials] == ["finished", "diverged", "diverged"] and last.best == last.trials[0]


# --- exact repetition ------------------------------------------------------------------------------------------------

SEARCH = ("local.lr=0.01..3,log", "method.beta=0..0.95", "model.hidden=[8],[4,4]")


def sweep_command(out: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "fedadc", "sweep", "small.yaml", *SEARCH, "--out", out, *options]


def written(folder: Path, tree: Any = SMALL, name: str = "small.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def results(out: Path) -> tuple[bytes, bytes]:
    return (out / "trials.jsonl").read_bytes(), (out / "choice.json").read_bytes()


def killed_often(place: Path, words: list[str], out: Path, kills: int) -> int:
    """Run a command to its end, and kill it with SIGKILL whenever it has trained a little; returns the kills."""

    def amount() -> int:
        """Bytes of records and trials: it grows with every round and every step of the sweep."""
        files = [*out.glob("*/*/metrics.jsonl"), *out.glob("trials.jsonl"), *out.glob("sweep.json")]
        return sum(file.stat().st_size for file in files)

    done = 0
    while True:
        process = subprocess.Popen(
            words, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        start, patience = amount(), time.monotonic() + 120
        while process.poll() is None and (done == kills or amount() == start):
            assert time.monotonic() < patience
            time.sleep(0.01)
        time.sleep(0.07 * done)  # at any moment: while runs are trained, between rungs, while a batch is asked for
        if process.poll() is None and done < kills:
            done += 1
            os.kill(process.pid, signal.SIGKILL) if done % 2 else os.killpg(process.pid, signal.SIGKILL)
        assert process.stderr is not None
        message = process.stderr.read().decode()
        if process.wait() != -signal.SIGKILL:
            assert process.returncode == 0, message
            return done


def test_a_killed_and_resumed_sweep_repeats_an_uninterrupted_one(tmp_path: Path) -> None:
    """With pruning; the one with two runs at once, the other with one, and killed."""
    config = written(tmp_path)
    settings: dict[str, Any] = {"sampler": "random", "pruner": "hyperband", "rungs": [1], "trials": 4, "batch": 2}
    whole = fedadc.sweep(config, parse_searches(SEARCH), out=tmp_path / "whole", jobs=2, **settings)
    options = ("--sampler", "random", "--pruner", "hyperband", "--rungs", "1", "--trials", "4", "--batch", "2")
    assert killed_often(tmp_path, [*sweep_command("killed", *options), "--jobs", "1"], tmp_path / "killed", 2) == 2
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    states = [trial.state for trial in whole.trials]
    assert len(states) == 4 and "pruned" in states and "finished" in states and "running" not in states


@pytest.mark.slow
@pytest.mark.parametrize("pruner", ["none", "median", "hyperband"])
def test_tpe_repeats_after_many_kills(tmp_path: Path, pruner: str) -> None:
    written(tmp_path, {**SMALL, "rounds": 9})
    options = ("--sampler", "tpe", "--pruner", pruner, "--trials", "20", "--batch", "5", "--seeds", "0,1")
    whole = subprocess.run([*sweep_command("whole", *options), "--jobs", "3"], cwd=tmp_path, capture_output=True)
    assert whole.returncode == 0, whole.stderr
    assert killed_often(tmp_path, [*sweep_command("killed", *options), "--jobs", "2"], tmp_path / "killed", 15) == 15
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


def test_equal_settings_share_their_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = fedadc.sweep(
        {**SMALL, "rounds": 1}, {"method.beta": [0.1, 0.9]}, sampler="random", trials=5, out=tmp_path / "out"
    )
    values = [t.settings["method.beta"] for t in result.trials]
    assert len(result.trials) == 5 and set(values) == {0.1, 0.9}
    folders = {f"trial-{values.index(beta):04d}" for beta in (0.1, 0.9)}
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == folders
    assert len({(t.settings["method.beta"], t.score) for t in result.trials}) == 2
    assert capfd.readouterr() == ("", "")  # neither we nor Optuna print


def test_a_rung_has_the_same_value_if_the_run_is_already_farther(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sampler": "random", "trials": 5, "pruner": "median", "rungs": [1, 2], "batch": 1}
    trials = fedadc.sweep(SMALL, {"local.lr": [0.1, 0.9]}, out=tmp_path / "out", **settings).trials
    for lr in (0.1, 0.9):
        equal = [t.rungs for t in trials if t.settings["local.lr"] == lr]
        assert len(equal) >= 2 and all(rungs == equal[0] for rungs in equal) and len(set(equal[0].values())) == 2


# --- files and the command line --------------------------------------------------------------------------------------


def test_a_file_has_the_settings_of_a_sweep_and_options_replace_them(tmp_path: Path, call: Call) -> None:
    (tmp_path / "deep").mkdir()
    written(tmp_path / "deep", {**SMALL, "rounds": 1}, "config.yaml")
    tree = {"title": "mine", "config": "deep/config.yaml", "search": {"local.lr": "0.01..1,log"}, "trials": 7}
    written(tmp_path, {**tree, "choose_by": "validation_loss"}, "lr.yaml")
    told = json.loads(fine(call("sweep", "lr.yaml", "--trials", "2", "local.lr=0.1,0.2", "--json")))
    assert [t["settings"]["local.lr"] for t in told["all"]] == [0.1, 0.2] and told["choose_by"] == "validation_loss"
    losses = [t["values"]["validation_loss"][0] for t in told["all"]]
    assert told["chosen"]["score"] == min(losses) and told["importance"]["reason"] == "only one key is swept"
    assert len(told["edges"]) == 1 and "stands at the edge of its grid, 0.1 to 0.2" in told["edges"][0]
    assert (tmp_path / "runs/lr-sweep/heatmap.png").is_file()
    inside = {"base": {**SMALL, "rounds": 1}, "search": {"local.lr": [0.1, 0.2]}}
    result = fedadc.sweep(inside, out=tmp_path / "base", choose_by="validation_loss")
    assert [t.score for t in result.trials] == losses


def test_the_table_fits_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty trials of thirty, the best first, however long their settings are."""
    from fedadc.cli.sweep_output import sweep_summary

    partition = {"name": "dirichlet", "alpha": 0.30000000000000004, "a_long_name_of_a_setting": "a long value" * 4}
    trials = [
        SweepTrial(
            trial=n,
            settings={"local.lr": n / 7, "model.hidden": [n, n], "data.partition": {**partition, "alpha": n + 1}},
            state="finished" if n < 15 else "pruned" if n < 29 else "diverged",
            rungs={"10": n / 100},
            score=n / 100 if n < 15 else None,
            values={"validation_accuracy": [n / 100] * 2, "test_accuracy": [n / 90] * 2} if n < 15 else {},
        )
        for n in range(30)
    ]
    shares = {"local.lr": 0.75, "model.hidden": 0.25}
    result = SweepResult(trials, trials[14], "validation_accuracy", "test_accuracy", ["a note"], shares, "", tmp_path)
    sweep_summary(result, as_json=False)
    told = capsys.readouterr().out
    table = told.split("best:")[0].splitlines()
    assert max(map(len, table)) == 80
    numbers = [int(line.split("│")[1]) for line in table if "│" in line and line.split("│")[1].strip()]
    assert numbers == [*range(14, -1, -1), *range(28, 23, -1)]
    assert "│ 14.0 ± 0.0 % │ chosen       │" in told and "│     (28.0 %) │ pruned at 10 │" in told
    assert "10 more trials are in trials.jsonl" in " ".join(table[-2:]).replace("  ", " ")
    assert "importance (fANOVA):  local.lr 75 %, model.hidden 25 %" in told and "test accuracy 15.6" in told


def test_a_sweep_whose_trials_all_diverge_chooses_none(tmp_path: Path, call: Call) -> None:
    config, out = str(written(tmp_path)), tmp_path / "out"
    answer = call("sweep", config, "local.lr=1e25,1e26", "--out", str(out))
    assert "nothing to choose" in answer.err and answer.code == 0 and not (out / "heatmap.png").exists()
    assert json.loads((out / "choice.json").read_text())["chosen"] is None


@pytest.mark.parametrize(
    ("search", "settings", "words"),
    [
        ({}, {}, "there is nothing to sweep"),
        ({"local.rl": [0.1, 0.2]}, {}, "local: key 'rl' is unknown; did you mean 'lr'"),
        ({"loval.lr": [0.1, 0.2]}, {}, "key 'loval' is unknown; did you mean 'local'"),
        ({"local.lr": [0.1, "fast"]}, {}, r"local\.lr must be a number, not 'fast'"),
        ({"local.lr": "0.1..1", "method.name": ["fedadc", "fedavgg"]}, {}, r"method\.name 'fedavgg' is unknown"),
        ({"method.beta": "0.5..2"}, {}, "beta"),  # the high corner is refused
        ({"local.steps": "1..5"}, {}, r"local\.steps must be a whole number; write its range as local\.steps=1\.\.5,i"),
        ({"local.lr": "0.1..1"}, {"sampler": "tpee"}, "sampler 'tpee' is unknown; did you mean 'tpe'"),
        ({"local.lr": "0.1..1"}, {"pruner": "halving"}, "pruner 'halving' is unknown; choose from"),
        ({"local.lr": "0.1..1"}, {"sampler": "grid"}, "is a range, and a grid needs values"),
        ({"local.lr": [0.1, 1.0]}, {"trials": 5}, "the grid has 2 settings and all are tried"),
        ({"local.lr": "0.1..1"}, {"trials": 0}, "trials must be at least 1"),
        ({"local.lr": [0.1]}, {"seeds": []}, "at least one seed"),
        ({"local.lr": [0.1]}, {"seeds": [1, 1]}, "seed twice"),
        ({"local.lr": [0.1]}, {"choose_by": "test_accuracy"}, "never by test data"),
        ({"local.lr": [0.1]}, {"choose_by": "validation_top5"}, "is not measured by this config; it measures"),
        ({"data.validation": [None]}, {}, "there is no validation data to choose a setting by; set data.validation"),
        ({"local.lr": [0.1, 1.0]}, {"rungs": [2]}, "name a pruner"),
        ({"local.lr": [0.1, 1.0]}, {"pruner": "median", "rungs": [4]}, "rising rounds from 1 .* to 3, not"),
        ({"local.lr": [0.1, 1.0]}, {"pruner": "median", "rungs": [2, 1]}, "rising rounds"),
        ({"local.lr": [0.1, 1.0]}, {"pruner": "hyperband", "rungs": [1, 2]}, "grow by a factor of 3"),
        ({"evaluate.every": [3]}, {"pruner": "median", "rungs": [2]}, "rising rounds from 3"),
        ({"cohort.size": [2, 7]}, {}, r"cohort\.size is 7, but there are only 6 clients"),
    ],
)  # fmt: skip
def test_bad_sweeps_are_refused_before_anything_runs(
    tmp_path: Path, search: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(FedadcError, match=words) as caught:
        fedadc.sweep(SMALL, search, out=tmp_path / "out", **settings)
    assert caught.value.exit_code == 2 and not (tmp_path / "out").exists()


def test_files_of_other_kinds_are_refused(tmp_path: Path, call: Call) -> None:
    experiment = str(written(tmp_path, {"title": "x", "base": SMALL, "runs": {"A": {}}, "seeds": [0], "budget": 1}))
    refused(call("sweep", experiment, "local.lr=0.1,0.2"), "is an experiment; run it with `fedadc experiment")
    sweep = str(written(tmp_path, {"base": SMALL, "search": {"local.lr": [0.1]}}, "sweep.yaml"))
    refused(call("run", sweep), "is a sweep; run it with `fedadc sweep")
    refused(call("experiment", sweep), "is a sweep; run it with `fedadc sweep")
    both = {"base": SMALL, "config": "small.yaml", "search": {"local.lr": [0.1]}}
    refused(call("sweep", str(written(tmp_path, both))), "either config (a file) or base")
    typo = {"base": SMALL, "search": {"local.lr": [0.1]}, "smapler": "tpe"}
    refused(call("sweep", str(written(tmp_path, typo))), "did you mean 'sampler'")
    refused(
        call("sweep", str(written(tmp_path)), "local.lr=0.1,0.2", "--seeds", "0;1"),
        "--seeds must be a number of seeds such as 3, or seeds such as",
    )


def test_a_folder_with_something_else_is_named_and_left_alone(grid: SweepResult, tmp_path: Path) -> None:
    before = contents(grid.out)
    with pytest.raises(
        FedadcError, match=r"has a sweep of other settings \(search\.local\.lr .*; choose another `out`"
    ):
        fedadc.sweep(SMALL, {**GRID, "local.lr": [1e-5, 0.3, 0.4]}, seeds=[0, 1], out=grid.out)
    with pytest.raises(FedadcError, match=r"of other settings \(config\.rounds 4, now 5\)"):
        fedadc.sweep({**SMALL, "rounds": 5}, GRID, seeds=[0, 1], out=grid.out)
    with pytest.raises(FedadcError, match=r"of other settings \(seeds \[0, 1\], now \[0\]\)"):
        fedadc.sweep(SMALL, GRID, out=grid.out)
    assert contents(grid.out) == before
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FedadcError, match=r"contains thesis\.txt and no sweep; choose another `out`"):
        fedadc.sweep(SMALL, GRID, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(FedadcError, match=r"thesis\.txt is not a folder"):
        fedadc.sweep(SMALL, GRID, out=tmp_path / "thesis.txt")
    (tmp_path / "thesis.txt").rename(tmp_path / "sweep.json")
    with pytest.raises(FedadcError, match="does not have the settings of a sweep"):
        fedadc.sweep(SMALL, GRID, out=tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "nonsense", "[1]", '{"trial": 0}', '{"trial": 1, "settings": {"local.lr": 0.1}}',
        '{"trial": 0, "settings": {"local.lr": 0.3}}', '{"trial": 0, "settings": {"local.lr": 0.1}, "state": "won"}',
        '{"trial": 0, "settings": {"local.lr": 0.1}, "state": "finished"}',
        '{"trial": 0, "settings": {"local.lr": 0.1}, "score": "high"}',
        '{"trial": 0, "settings": {"local.lr": 0.1}, "import": "os"}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_file_of_trials_is_named(tmp_path: Path, line: str) -> None:
    tree, search = {**SMALL, "rounds": 1}, {"local.lr": [0.1, 0.2]}
    out = tmp_path / "out"
    out.mkdir()
    claim_folder(out, read_sweep(tree, search, {}, print), print)
    (out / "trials.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=r"trials\.jsonl, line 1 is not "):
        fedadc.sweep(tree, search, out=out)
    assert (out / "trials.jsonl").read_text() == line + "\n"


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path: Path, call: Call) -> None:
    config = str(written(tmp_path))
    with folder_lock(tmp_path / "out"):
        refused(call("sweep", config, "local.lr=0.1,0.2", "--out", str(tmp_path / "out")), "another process is writing")


def test_changed_user_code_is_another_sweep(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import fedadc\nclass Mine(fedadc.methods.FedAvg):\n  pass\n")
    config, out = written(tmp_path, {**SMALL, "method": "mine:Mine"}), tmp_path / "out"
    plan = read_sweep(config, {"local.lr": [0.1]}, {}, print)
    assert plan.record()["code"] == {"mine.py": checksum((tmp_path / "mine.py").read_bytes())}
    out.mkdir()
    claim_folder(out, plan, print)
    known = json.loads((out / "sweep.json").read_text())
    (out / "sweep.json").write_text(json.dumps({**known, "code": {"mine.py": "another"}}))
    with pytest.raises(FedadcError, match=r"out has a sweep of other settings \(code\.mine\.py \"another\", now"):
        fedadc.sweep(config, {"local.lr": [0.1]}, out=out)


def test_code_beside_the_config_of_a_strangers_run_is_not_loaded(tmp_path: Path) -> None:
    fedadc.run({**SMALL, "rounds": 1}, out=tmp_path / "run")
    (tmp_path / "run/evil.py").write_text("raise SystemExit('loaded')\n")
    with pytest.raises(FedadcError, match=r"the user code evil:Method .* is not loaded"):
        fedadc.sweep(tmp_path / "run/config.yaml", {"method": ["fedavg", "evil:Method"]}, out=tmp_path / "out")
    (tmp_path / "run/config.yaml").rename(tmp_path / "config.yaml")  # to a folder of one's own
    (tmp_path / "run/evil.py").rename(tmp_path / "evil.py")
    with pytest.raises(SystemExit, match="loaded"):
        fedadc.sweep(tmp_path / "config.yaml", {"method": ["fedavg", "evil:Method"]}, out=tmp_path / "out")


def test_a_config_of_python_can_be_swept(tmp_path: Path) -> None:
    config = fedadc.load_config({**SMALL, "rounds": 1})
    plan = read_sweep(config, {"method": ["fedavg", "fedadc+"]}, {}, print)
    assert [type(plan.config(point, 3).objective).__name__ for point in plan.points] == [
        "CrossEntropy",
        "SelfConfidence",
    ]
    assert plan.config(plan.points[0], 3).seed == 3


def test_the_shipped_sweep_is_valid() -> None:
    plan = read_sweep(Path(__file__).parents[2] / "experiments/sweep-digits.yaml", {}, {}, print)
    assert (plan.trials, plan.batch, plan.rungs, plan.sweep.seeds) == (24, 4, [10, 20, 30], [0, 1])
    assert plan.config({"local.lr": 0.1, "method.beta": 0.5, "local.steps": 4}, 0).rounds == 40


def test_a_run_that_fails_is_named_and_the_others_are_trained(tmp_path: Path) -> None:
    code = "import fedadc\nclass Buggy(fedadc.methods.FedAvg):\n  def update(self, theta, server, mean, info):\n"
    (tmp_path / "buggy.py").write_text(code + "    raise ValueError('oops')\n")
    config, out = written(tmp_path, {**SMALL, "rounds": 1}), tmp_path / "out"
    with pytest.raises(FedadcError, match="trial-0000/seed0: ValueError: oops") as caught:
        fedadc.sweep(config, {"method": ["buggy:Buggy", "fedavg"]}, out=out)
    assert caught.value.exit_code == 1
    assert (out / "trial-0001/seed0/model.safetensors").is_file()
    states = [json.loads(line)["state"] for line in (out / "trials.jsonl").read_text().splitlines()]
    assert states == ["running", "running"]  # nothing is decided; the same command goes on
