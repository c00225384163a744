"""The command line, end to end: files, tables, error messages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
import yaml
from safetensors.torch import load_file
from torch import nn

from commands import FILES, SMALL, Call, command, contents, fine, records, refused
from fedadc.cli import app as cli
from fedadc.config.build import load_data
from fedadc.data import HeldOut
from fedadc.runs.record import load_config
from fedadc.studies import demo
from fedadc.system.files import folder_lock

PNG = b"\x89PNG\r\n\x1a\n"
KEYS = [
    "round",
    "lr",
    "train_loss",
    "test_accuracy",
    "test_loss",
    "cohort",
    "samples",
    "bytes_up",
    "bytes_down",
    "ledger",
    "seconds",
]
# --- help ------------------------------------------------------------------------------------------------------------


def commands(node: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield above
    for name, inner in getattr(node, "commands", {}).items():
        yield from commands(inner, (*above, name))


COMMANDS = list(commands(typer.main.get_command(cli.app)))


def test_all_documented_commands_exist() -> None:
    promised = {"run", "demo", "compare", "experiment", "evaluate", "list", "init", "data", "data get", "data show"}
    assert promised <= {" ".join(words) for words in COMMANDS}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help(call: Call, words: Sequence[str]) -> None:
    text = fine(call(*words, "--help"))
    assert "Usage" in text and len(text.splitlines()) > 5


def test_version(call: Call) -> None:
    import fedadc

    assert fine(call("--version")).strip() == fedadc.__version__


def test_help_and_importing_the_package_do_not_load_torch() -> None:
    code = """
import sys, fedadc
heavy = {"torch", "numpy", "matplotlib"}
assert not heavy & sys.modules.keys(), ("import fedadc", heavy & sys.modules.keys())
from fedadc.cli.app import main
for words in (["--help"], ["run", "--help"], ["data", "show", "--help"], ["--version"]):
    sys.argv = ["fedadc", *words]
    try:
        main()
    except SystemExit as done:
        assert not done.code
    assert not heavy & sys.modules.keys(), (words, heavy & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- end to end ------------------------------------------------------------------------------------------------------


def test_from_init_to_comparison(call: Call, tmp_path: Path) -> None:
    """`run` and `compare` in separate processes, as a user starts them."""
    assert "fedadc.yaml" in fine(call("init"))
    answer = command("run", "fedadc.yaml", "rounds=3", "--out", "runs/a", cwd=tmp_path)
    assert "runs/a" in fine(answer) and "3/3 rounds" in answer.err and "s left" in answer.err
    run = tmp_path / "runs/a"
    assert {p.name for p in run.iterdir()} == FILES
    assert [list(r) for r in records(run)] == [KEYS] * 3 and [r["round"] for r in records(run)] == [1, 2, 3]
    found = json.loads(fine(call("evaluate", "runs/a", "--json")))
    last = records(run)[-1]
    assert found == {"test": {"accuracy": last["test_accuracy"], "loss": last["test_loss"]}}
    assert "fedadc" in fine(command("compare", "runs", "--plot", "curve.png", cwd=tmp_path))
    assert (tmp_path / "curve.png").read_bytes()[:8] == PNG
    shown = fine(call("data", "show", "fedadc.yaml", "--plot", "who.png"))
    assert "50 clients" in shown and (tmp_path / "who.png").read_bytes()[:8] == PNG
    fine(call("run", "fedadc.yaml", "rounds=3", "--out", "here"))
    assert (tmp_path / "here/model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_the_starter_config_has_the_specified_settings(call: Call, tmp_path: Path) -> None:
    fine(call("init", "start.yaml"))
    config = load_config(tmp_path / "start.yaml")
    assert (config.rounds, config.data.clients, config.cohort.size, config.local.steps) == (60, 50, 10, 8)
    refused(call("init", "start.yaml"), "already exists")
    refused(call("init", "no/such/folder/x.yaml"), "cannot write", code=4)


def test_a_run_writes_its_files_and_records(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "--out", "a"))
    run = tmp_path / "a"
    assert {p.name for p in run.iterdir()} == FILES
    size = 4 * (65 * 16 + 17 * 10)
    for t, record in enumerate(records(run), start=1):
        assert list(record) == KEYS and record["round"] == t and record["lr"] == 0.1
        assert len(set(record["cohort"])) == 4 and set(record["cohort"]) <= set(range(10))
        assert record["bytes_up"] == 4 * size and record["bytes_down"] == 2 * 4 * size  # theta and m
        assert 0 <= record["test_accuracy"] <= 1 and record["seconds"] > 0
    resolved = load_config(run / "config.yaml")
    assert resolved.data.test == 0.2 and resolved.data.seed == 0 and resolved.tree()["method"]["beta_local"] == 0.9
    facts = json.loads((run / "environment.json").read_text())
    assert facts["torch"] == torch.__version__ and {"python", "platform", "git", "device"} <= facts.keys()


def test_all_files_of_a_run_have_the_same_permissions(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "rounds=1", "--out", "a"))
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert len(set(modes.values())) == 1, modes


def test_the_run_directory_is_named_after_config_and_seed(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "rounds=1", "--seed", 5))
    assert {p.name for p in (tmp_path / "runs/small-seed5").iterdir()} == FILES


def test_the_same_config_gives_the_same_bits_and_another_seed_others(call: Call, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        fine(call("run", "small.yaml", "--out", name, "--seed", seed))
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b != c
    assert records(tmp_path / "a", seconds=False) == records(tmp_path / "b", seconds=False)
    assert records(tmp_path / "a", seconds=False) != records(tmp_path / "c", seconds=False)
    fine(call("run", tmp_path / "a" / "config.yaml", "--out", "again"))
    assert (tmp_path / "again/model.safetensors").read_bytes() == a, "the resolved config is the same run"


def test_the_evaluation_interval_changes_nothing_else(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "--out", "each"))
    fine(call("run", "small.yaml", "evaluate.every=2", "evaluate.metrics=[top5, per_class]", "--out", "second"))
    each, second = records(tmp_path / "each", False), records(tmp_path / "second", False)
    assert [r["round"] for r in second if "test_accuracy" in r] == [2, 3]
    assert len(second[1]["test_per_class"]) == 10 and second[1]["test_top5"] >= second[1]["test_accuracy"]
    assert second == [
        {k: v for k, v in (more | r).items() if k in r} for r, more in zip(second, each, strict=True)
    ]  # fmt: skip
    assert (tmp_path / "each/model.safetensors").read_bytes() == (tmp_path / "second/model.safetensors").read_bytes()


def test_drift_is_recorded_compared_and_drawn(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "--out", "plain"))
    for name in ("fedadc", "slowmo", "fedavg"):
        settings = ("method.beta=0.9",) if name != "fedavg" else ()
        shown = call("run", "small.yaml", f"method={name}", *settings, "evaluate.drift=true", "--out", f"runs/{name}")
        assert "drift spread 0." in fine(shown)
    measured, plain = records(tmp_path / "runs/fedadc", False), records(tmp_path / "plain", False)
    assert [{k: v for k, v in r.items() if not k.startswith("drift_")} for r in measured] == plain
    assert all(r["drift_distance"] > r["drift_spread"] / 2 > 0 and -1 <= r["drift_cosine"] <= 1 for r in measured)
    assert ["drift_momentum_cosine" in r for r in measured] == [False, True, True]
    for metric, runs in (("drift_spread", 3), ("drift_distance", 3), ("drift_cosine", 3), ("drift_momentum_cosine", 2)):
        rows = json.loads(fine(call("compare", "runs", "--metric", metric, "--plot", f"{metric}.png", "--json")))
        assert len(rows) == runs and (tmp_path / f"{metric}.png").read_bytes().startswith(b"\x89PNG")
    refused(call("compare", "plain", "--metric", "drift_spread"), "has no drift_spread in any round")


def test_a_stop_accuracy_ends_a_run_early(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "rounds=50", "stop.accuracy=0.2", "data.partition=iid", "--out", "a"))
    seen = [r["test_accuracy"] for r in records(tmp_path / "a")]
    assert len(seen) < 50 and seen[-1] >= 0.2 and all(a < 0.2 for a in seen[:-1])


def test_validation_data_is_measured_and_decides_when_to_stop(call: Call, tmp_path: Path) -> None:
    words = ("rounds=50", "data.validation=0.2", "data.partition=iid", "stop.accuracy=0.2")
    fine(call("run", "small.yaml", *words, "--out", "a"))
    seen = [r["validation_accuracy"] for r in records(tmp_path / "a")]
    assert len(seen) < 50 and seen[-1] >= 0.2 and all(a < 0.2 for a in seen[:-1])
    found = json.loads(fine(call("evaluate", "a", "--json")))
    assert set(found) == {"validation", "test", "best validation", "best test"}
    assert found["best validation"]["accuracy"] == max(seen)


def test_patience_ends_a_run_early_and_says_why(call: Call, tmp_path: Path) -> None:
    words = ("rounds=60", "data.validation=0.2", "stop.patience=3", "local.lr=0.3")
    printed = fine(call("run", "small.yaml", *words, "--out", "a"))
    last = records(tmp_path / "a")[-1]
    said = last["stopped"]
    assert last["round"] < 60 and said.startswith("validation_accuracy has not improved for 3 evaluations (best 0.")
    assert f"stopped early: {said}" in " ".join(printed.split())
    assert "(model-best.safetensors)" in " ".join(printed.split())
    again = call("resume", "a")
    assert (
        again.code == 0 and "the run is already finished at round" in again.err and said in " ".join(again.err.split())
    )
    fine(call("resume", "a", "stop.patience=null", f"rounds={last['round'] + 2}"))
    assert len(records(tmp_path / "a")) == last["round"] + 2


def test_patience_without_validation_data_is_refused_before_training(call: Call, tmp_path: Path) -> None:
    refused(call("run", "small.yaml", "stop.patience=3", "--out", "a"), "stop.patience needs validation data; hold out")
    words = ("data.validation=0.2", "stop.metric=validation_macro_f1")
    refused(
        call("run", "small.yaml", *words, "--out", "a"),
        "validation_macro_f1 is not measured; these are: validation_acc",
    )
    refused(
        call("run", "small.yaml", "stop.metric=test_accuracy", "--out", "a"), "stop.metric must be one of validation"
    )
    refused(
        call("run", "small.yaml", "checkpoint.best=true", "--out", "a"), "checkpoint.best: there is no validation data"
    )
    words = ("data.validation=0.2", "checkpoint.best=true", "method=fedper")
    refused(call("run", "small.yaml", *words, "--out", "a"), "judged by the clients' own models")
    assert not (tmp_path / "a").exists()


OWN_NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))

    def forward(self, x):
        return self.body(x)
"""


def test_the_saved_model_loads_into_a_users_module(call: Call, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(OWN_NET)
    fine(call("run", "small.yaml", "model={name: net:Net}", "--out", "a"))
    space: dict[str, Any] = {}
    exec(OWN_NET, space)
    model: nn.Module = space["Net"]()
    model.load_state_dict(load_file(tmp_path / "a/model.safetensors"))

    _, data = load_data(load_config(tmp_path / "small.yaml"))
    assert data.test is not None
    with torch.no_grad():
        right = (model(data.test.x / 16.0).argmax(dim=1) == data.test.y).double().mean().item()
    last = records(tmp_path / "a")[-1]
    assert right == last["test_accuracy"]
    found = json.loads(fine(call("evaluate", "a", "--json")))  # finds net.py again
    assert found["test"]["accuracy"] == right


def test_training_starts_from_saved_weights(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "--out", "a"))
    fine(call("run", "small.yaml", "rounds=1", "local.lr=1e-12", "method=fedavg", "model.weights=a/model.safetensors",
              "--out", "b"))  # fmt: skip
    assert records(tmp_path / "b")[0]["test_accuracy"] == records(tmp_path / "a")[-1]["test_accuracy"]


# --- evaluate, compare, data, list -----------------------------------------------------------------------------------


def test_evaluate_with_more_metrics_and_other_data(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "--out", "a"))
    found = json.loads(fine(call("evaluate", "a", "--metrics", "top5, macro_f1,per_class", "--json")))["test"]
    assert list(found) == ["accuracy", "loss", "top5", "macro_f1", "per_class"]
    assert "macro_f1" in fine(call("evaluate", "a", "--metrics", "macro_f1"))
    _, data = load_data(load_config(tmp_path / "small.yaml"))
    assert data.test is not None
    np.savez(tmp_path / "more.npz", x=data.test.x.numpy(), y=data.test.y.numpy())
    other = json.loads(fine(call("evaluate", "a", "--data", "more.npz", "--json")))
    assert other["more.npz"]["accuracy"] == found["accuracy"] and other["more.npz"]["loss"] == found["loss"]
    np.savez(tmp_path / "wrong.npz", x=np.zeros((3, 7), dtype=np.uint8), y=np.arange(3))
    refused(call("evaluate", "a", "--data", "wrong.npz"), "trained on [1, 8, 8]", code=5)
    refused(call("evaluate", "a", "--data", "absent.npz"), "absent.npz", code=5)
    refused(call("evaluate", "a", "--metrics", "top6"), "error: metric 'top6' is unknown; did you mean 'top5'?")
    (tmp_path / "a/model.safetensors").write_bytes(b"nonsense")
    refused(call("evaluate", "a"), "not a safetensors file", code=5)
    (tmp_path / "a/model.safetensors").unlink()
    refused(call("evaluate", "a"), "has not finished", code=5)


def test_compare_groups_seeds_and_plots(call: Call, tmp_path: Path) -> None:
    for method in ("fedavg", "fedadc+"):
        for seed in (0, 1):
            fine(call("run", "small.yaml", f"method={method}", "--seed", seed, "--out", f"all/{method}-{seed}"))
    rows = json.loads(fine(call("compare", "all", "--target", "0.05", "--plot", "curve.png", "--json")))
    assert [(r["label"], r["seeds"], r["reached"]) for r in rows] == [("fedadc+", 2, 2), ("fedavg", 2, 2)]
    assert rows[0]["bytes_down"] == 2 * rows[1]["bytes_down"] and rows[0]["bytes_up"] == rows[1]["bytes_up"]
    assert (tmp_path / "curve.png").read_bytes()[:8] == PNG
    table = fine(call("compare", "all/fedavg-0", "all/fedavg-1", "all/fedadc+-0"))
    assert "fedadc+" in table and "±" in table
    refused(call("compare", "all", "--metric", "accuracy"), "test_accuracy")
    refused(call("compare", "all/fedavg-0", "absent"), "absent")
    (tmp_path / "empty").mkdir()
    refused(call("compare", "empty"), "contains none")


def test_data_show_counts_samples_per_client_and_class(call: Call, tmp_path: Path) -> None:
    found = json.loads(fine(call("data", "show", "small.yaml", "--json")))
    assert len(found["counts"]) == 10 and all(sum(n > 0 for n in row) == 2 for row in found["counts"])
    assert sum(map(sum, found["counts"])) == found["samples"]["train"] and sum(found["samples"].values()) == 1797
    text = fine(call("data", "show", "small.yaml", "data.clients=60", "--plot", "p/who.png"))
    assert "20 more clients" in text and (tmp_path / "p/who.png").read_bytes()[:8] == PNG
    refused(call("data", "show", "small.yaml", "data.partition.labels_per_client=11"), "only 10 classes")


def test_data_show_of_numbers_counts_samples_only(call: Call, tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("a,pulse\n" + "".join(f"{i},{i / 7}\n" for i in range(50)))
    data = {"name": "csv", "path": "n.csv", "label": "pulse", "clients": 4, "partition": "iid"}
    (tmp_path / "n.yaml").write_text(json.dumps({"rounds": 1, "task": "regression", "data": data, "model": "mlp"}))
    text = fine(call("data", "show", "n.yaml", "--plot", "n.png"))
    assert "10 samples each" in text and "label" not in text and "class" not in text
    found = json.loads(fine(call("data", "show", "n.yaml", "--json")))
    assert found["classes"] == [] and found["counts"] == [[10]] * 4


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("methods", {"fedavg", "slowmo", "fedadc", "fedadc_double", "fedadc+"}),
        ("objectives", {"cross_entropy", "self_confidence"}),
        ("datasets", {"digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "npz", "folder", "csv"}),
        ("models", {"mlp", "logistic", "cnn", "resnet18"}),
        ("partitions", {"iid", "sort", "dirichlet", "natural", "pooled"}),
        ("schedules", {"constant", "step", "cosine", "exponential"}),
    ],
)
def test_list(call: Call, table: str, names: set[str]) -> None:
    entries = json.loads(fine(call("list", table, "--json")))
    assert names <= {e["name"] for e in entries} and all(e["summary"] for e in entries)
    shown = fine(call("list", table))
    assert all(name in shown for name in names)


def test_list_shows_settings_with_their_defaults(call: Call) -> None:
    methods = {e["name"]: e["settings"] for e in json.loads(fine(call("list", "methods", "--json")))}
    assert list(methods["fedadc"]) == ["beta", "beta_local", "nesterov", "server_lr"]
    assert methods["fedadc"]["beta"] == "0.9" and methods["fedadc"]["nesterov"] == "false"


# --- error messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fragment", "code"),
    [
        (["run", "absent.yaml"], "fedadc init", 2),
        (["run", "."], "is a folder", 2),
        (["run", "small.yaml", "local.lrr=1"], "did you mean 'lr'?", 2),
        (["run", "small.yaml", "nonsense"], "key.sub=value", 2),
        (["run", "small.yaml", "rounds=-1"], "rounds must be at least 1", 2),
        (["run", "small.yaml", "cohort.size=11"], "only 10 clients", 2),
        (["run", "small.yaml", "data.partition.labels_per_client=11"], "only 10 classes", 2),
        (["run", "small.yaml", "--seed", "-1"], "seed", 2),
        (["run", "small.yaml", "--device", "tpu"], "--device", 2),
        (["run", "small.yaml", "--device", "cuda:99"], "CUDA", 2),
        (["run", "small.yaml", "--out", "small.yaml"], "is a file", 2),
        (["run", "small.yaml", "--out", "x" * 300], "x", 2),
        (["run", "small.yaml", "local.steps=1000000000000000000000000000000"], "local.steps", 2),
        (["evaluate", "absent"], "absent", 2),
        (["compare", "absent"], "absent", 2),
        (["data", "show", "absent.yaml"], "absent.yaml", 2),
        (["data", "get", "mnits"], "did you mean 'mnist'?", 2),
        (["data", "get", "digits"], "needs no download; it is part of the package", 2),
        (["resume", "nowhere"], "there is no run directory nowhere", 2),
        (["resume", "."], ". is not a run directory: it has no config.yaml", 2),
        (["data", "get", "mnist", "--from", "absent", "--data-dir", "d"], "absent", 2),
        (["run", "small.yaml", "--out", "small.yaml/x"], "cannot write", 4),
        (["run", "small.yaml", "data={name: npz, path: absent.npz}"], "absent.npz", 5),
        (["run", "small.yaml", "data.name=cifar10", "--data-dir", "nowhere"], "fedadc data get cifar10", 5),
    ],
    ids=lambda v: " ".join(v)[:60] if isinstance(v, list) else "",
)
def test_user_errors_are_one_sentence_and_write_no_files(
    call: Call, tmp_path: Path, words: list[str], fragment: str, code: int
) -> None:
    if "cuda:99" in words and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    refused(call(*words), fragment, code)
    assert [p.name for p in tmp_path.iterdir()] == ["small.yaml"]


@pytest.mark.parametrize(
    "words",
    [["nonsense"], ["run"], ["run", "small.yaml", "--nonsense"], ["list", "tables"], ["demo", "--seeds", "0"],
     ["compare"], ["run", "small.yaml", "--seed", "x"], ["compare", "a", "--target", "high"]],
    ids=" ".join,
)  # fmt: skip
def test_usage_errors_exit_with_2_and_write_no_files(call: Call, tmp_path: Path, words: list[str]) -> None:
    answer = call(*words)
    assert answer.code == 2 and answer.out == "" and "Traceback" not in answer.err
    assert "rror" in answer.err and [p.name for p in tmp_path.iterdir()] == ["small.yaml"]


def test_a_user_error_in_a_separate_process(tmp_path: Path) -> None:
    refused(command("run", "absent.yaml", cwd=tmp_path), "absent.yaml")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_replaced_only_with_overwrite(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()  # an empty folder may be used
    fine(call("run", "small.yaml", "--out", "a"))
    before = contents(run)
    refused(call("run", "small.yaml", "--out", "a"), "--overwrite")
    refused(call("run", "small.yaml", "local.lrr=1", "--out", "a", "--overwrite"), "lr")
    assert contents(run) == before
    fine(call("run", "small.yaml", "rounds=1", "--out", "a", "--overwrite"))
    assert len(records(run)) == 1 and {p.name for p in run.iterdir()} == FILES
    (run / "thesis.txt").write_text("years of work")
    before = contents(run)
    refused(call("run", "small.yaml", "--out", "a", "--overwrite"), "thesis.txt")
    assert contents(run) == before


def test_a_killed_run_can_be_overwritten(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "rounds=1", "--out", "a"))
    (tmp_path / "a/model.safetensors").rename(tmp_path / "a/model.safetensors.part")
    fine(call("run", "small.yaml", "rounds=1", "--out", "a", "--overwrite"))
    assert {p.name for p in (tmp_path / "a").iterdir()} == FILES


def test_a_read_only_folder_is_refused(call: Call, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write everywhere")
    refused(call("run", "small.yaml", "--out", "locked/a"), "cannot write", code=4)
    refused(call("run", "small.yaml", "--out", "locked"), "cannot write", code=4)


def test_a_diverging_run_gives_advice_and_keeps_its_rounds(call: Call, tmp_path: Path) -> None:
    answer = call("run", "small.yaml", "rounds=50", "local.lr=10", "local.weight_decay=10", "--out", "a")
    assert answer.code == 3 and answer.out == ""
    last = answer.err.splitlines()[-1]
    assert last.startswith("error: ") and "local.lr" in last and "Traceback" not in answer.err
    kept = records(tmp_path / "a")
    assert (
        len(kept) >= 2 and f"round {len(kept) + 1}:" in last and {p.name for p in (tmp_path / "a").iterdir()} == FILES
    )
    assert all(torch.isfinite(t).all() for t in load_file(tmp_path / "a/model.safetensors").values())


def test_an_interrupted_run_keeps_what_was_trained(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({**SMALL, "rounds": 10**6}))
    words = [sys.executable, "-m", "fedadc", "run", "small.yaml", "--out", "a"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "a/metrics.jsonl"
    began = time.monotonic()
    while time.monotonic() < began + 60 and not (metrics.is_file() and metrics.stat().st_size > 0):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and "interrupted" in err
    assert records(tmp_path / "a") and load_file(tmp_path / "a/model.safetensors")


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fedadc", "list", "methods"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(timeout=60) in (0, 1) and err == ""


# --- the demo --------------------------------------------------------------------------------------------------------

NAMES = ["fedavg", "slowmo", "fedadc-heavy-ball", "fedadc-nesterov", "fedadc+"]
LABELS = ["FedAvg", "SlowMo", "FedADC heavy-ball", "FedADC Nesterov", "FedADC+"]


def test_a_short_demo(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo.BASE, "rounds", 2)
    answer = call("demo", "--seeds", "2", "--out", "d")
    text = fine(answer)
    expected = {f"{name}-seed{seed}" for name in NAMES for seed in (0, 1)}
    assert {p.name for p in (tmp_path / "d").iterdir()} == expected | {"convergence.png"}
    assert all({p.name for p in (tmp_path / "d" / name).iterdir()} == FILES for name in expected)
    assert all(word in text for word in " ".join(LABELS).split()) and "±" in text and "convergence.png" in text
    assert "10/10" in answer.err and "s left" in answer.err
    assert (tmp_path / "d/convergence.png").read_bytes()[:8] == PNG
    rows = json.loads(fine(call("compare", "d", "--json")))
    assert sorted(r["label"] for r in rows) == sorted(LABELS) and {r["seeds"] for r in rows} == {2}
    refused(call("demo", "--seeds", "2", "--out", "d"), "not empty")
    again = json.loads(fine(call("demo", "--seeds", "1", "--out", "d", "--overwrite", "--json")))
    assert [r["label"] for r in again] == LABELS and {r["target"] for r in again} == {0.9}


@pytest.mark.slow
def test_the_demo_shows_what_the_paper_claims(tmp_path: Path) -> None:
    text = fine(command("demo", "--seeds", "1", "--out", "d", cwd=tmp_path))
    assert all(word in text for word in " ".join(LABELS).split())
    rows = json.loads(fine(command("compare", "d", "--target", "0.9", "--json", cwd=tmp_path)))
    accuracy = {r["label"]: r["value"] for r in rows}
    rounds = {r["label"]: r["rounds_to_target"] or 61 for r in rows}
    assert accuracy["FedAvg"] > 0.8 and min(a for n, a in accuracy.items() if n != "FedAvg") > accuracy["FedAvg"]
    assert rounds["FedADC Nesterov"] < rounds["SlowMo"] < rounds["FedAvg"]


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (("list", "method"), "did you mean 'methods'?"),
        (("run", "small.yaml", "--seed", "abc"), "--seed"),
        (("list",), "see `fedadc list --help`."),
        (("data", "get"), "see `fedadc data get --help`."),
        (("frob",), "No such command 'frob'; see `fedadc --help`."),
        (("run", "small.yaml", "--sed", "1"), "--seed"),
        (("run", "small.yaml", "seed=2", "--seed", "1"), "use --seed or seed=N, not both"),
    ],
)
def test_usage_errors_are_one_sentence_too(call: Any, words: tuple[str, ...], fragment: str) -> None:
    refused(call(*words), fragment)


def test_a_missing_argument_is_named(call: Any) -> None:
    """In capitals or not, as this version of Typer writes it."""
    assert "missing argument 'config'; see `fedadc run --help`." in refused(call("run")).lower()


def test_a_closed_pipe_does_not_stop_training(tmp_path: Path) -> None:
    """`fedadc run ... 2>&1 | head -1`: the pipe closes after one line, but the run continues to its last round."""
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    command = f"{sys.executable} -m fedadc run small.yaml rounds=30 --out a 2>&1 | head -1"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    deadline = time.monotonic() + 60
    while not (tmp_path / "a/model.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len((tmp_path / "a/metrics.jsonl").read_text().splitlines()) == 30
    assert (tmp_path / "a/model.safetensors").exists()


def test_the_notes_of_a_loader_are_printed_and_recorded(call: Any, tmp_path: Path) -> None:
    rows = "\n".join(f"{i},{'ab'[i % 2]},{i % 3}" for i in range(60))
    (tmp_path / "t.csv").write_text(f"age,kind,label\n{rows}\n")
    (tmp_path / "t.yaml").write_text(
        "rounds: 1\ndata: {name: csv, path: t.csv, label: label, clients: 4, scale: none}\nmodel: logistic\n"
        "local: {lr: 0.001}\n"
    )
    answer = call("run", "t.yaml", "--out", "a")
    fine(answer)
    assert "kind: text, 2 categories" in answer.err and "age has values beyond" in answer.err
    notes = json.loads((tmp_path / "a/environment.json").read_text())["data_notes"]
    assert any("age: number, 0 to 59, not scaled" in note for note in notes)


def test_evaluate_reads_a_table_with_the_columns_of_the_training_rows(call: Any, tmp_path: Path) -> None:
    """Every client has a category of its own in the row that it holds out; the model has no input for it."""
    rows = [[str(i % 5), f"site {i // 10}", "ab"[i % 2], "xy"[i % 2]] for i in range(60)]
    labels, sites = np.array([row[3] for row in rows]), np.array([row[1] for row in rows])
    for i in HeldOut(0.2).rows(labels, sites).test:
        rows[i][2] = f"only in row {i}"
    (tmp_path / "t.csv").write_text("\n".join(map(",".join, [["size", "site", "kind", "label"], *rows])))
    (tmp_path / "more.csv").write_text("label,kind,size\nx,a,3\ny,b,1\ny,b,2\n")
    (tmp_path / "t.yaml").write_text(
        "rounds: 5\ndata: {name: csv, path: t.csv, label: label, client: site}\nmodel: logistic\n"
    )
    fine(call("run", "t.yaml", "--out", "a"))
    assert json.loads(fine(call("evaluate", "a", "--json", "--data", "more.csv")))["more.csv"]["accuracy"] == 1
    assert json.loads(fine(call("evaluate", "a", "--json")))["test"]["accuracy"] < 1


def test_the_old_run_is_restored_if_the_new_one_finishes_no_round(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "--out", "a"))
    before = contents(tmp_path / "a")
    refused(call("run", "small.yaml", "local.lr=1e25", "--out", "a", "--overwrite"), "diverged", code=3)
    assert contents(tmp_path / "a") == before
    fine(call("run", "small.yaml", "rounds=1", "--out", "a", "--overwrite"))
    assert len(records(tmp_path / "a")) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"small.yaml", "a"}  # no temporary files remain


def test_a_second_process_in_a_run_directory_is_refused(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "--out", "a"))
    before = contents(tmp_path / "a")
    with folder_lock(tmp_path / "a"):
        refused(call("run", "small.yaml", "--out", "a", "--overwrite"), "another process is writing to a")
    assert contents(tmp_path / "a") == before


def test_compare_names_unfinished_runs(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "--out", "a"))
    lines = (tmp_path / "a/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a/metrics.jsonl").write_text("".join(lines[:2]))
    assert "a ended after 2 of 3 rounds" in call("compare", "a").err


def test_dollar_signs_in_a_label_are_not_a_formula(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", r"label='$\frac{$'", "--out", "a"))
    fine(call("compare", "a", "--plot", "c.png"))
    assert (tmp_path / "c.png").read_bytes().startswith(PNG)


# --- personalize -----------------------------------------------------------------------------------------------------


def test_personalize_prints_a_table_that_fits_and_writes_a_folder_and_a_plot(call: Call) -> None:
    call("run", "small.yaml", "label=a run with quite a long label", "--out", "a", "--workers", 0)
    call("run", "small.yaml", "method=local_only", "--out", "b", "--workers", 0)
    answer = call("personalize", "a", "b", "--regularizer", "none", "--regularizer", "prox", "--plot", "both.png")
    text = fine(answer)
    assert max(map(len, text.splitlines())) <= 80 and "a/personal" in text and "b/personal" in text
    assert "10/10 clients" in answer.err  # progress
    figures = json.loads(fine(call("personalize", "a", "--json", "--overwrite")))[0]
    shown = f"{100 * figures['personal_mean']:.1f} ± {100 * figures['personal_std']:.1f}"
    both = f"{100 * figures['global_cumulative']:.1f} → {100 * figures['personal_cumulative']:.1f}"
    assert shown in text and both in text and figures["clients"] == figures["tested"] == 10
    assert Path("both.png").read_bytes().startswith(PNG) and Path("b/personal/personal.png").is_file()


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (["nowhere"], "there is no run directory nowhere", 2),
        (["a"], "a/personal already exists", 2),
        (["a", "--clients", "8-12", "--overwrite"], "there is no client 12", 2),
        (["a", "--lr", "nan", "--overwrite"], "lr must be positive", 2),
        (["a", "--data", "none.npz"], "there is no file none.npz", 5),
        (["a", "b", "--out", "c"], "--out is for one run", 2),
        (["a", "a"], "twice", 2),
        (["unfinished"], "has no model.safetensors: the run has not finished", 5),
    ],
)
def test_personalize_refuses_in_one_sentence(
    call: Call, personal: Path, words: list[str], message: str, code: int
) -> None:
    before = contents(personal)
    answer = call("personalize", *words)
    assert answer.code == code and message in answer.err and answer.err.count("\n") == 1
    assert contents(personal) == before


@pytest.fixture
def personal(call: Call, tmp_path: Path) -> Path:
    """A folder with three runs: a with personal models, b without, and one that is unfinished."""
    call("run", "small.yaml", "--out", "a", "rounds=1", "--workers", 0)
    shutil.copytree("a", "b")
    shutil.copytree("a", "unfinished")
    Path("unfinished/model.safetensors").unlink()
    call("personalize", "a", "--clients", 0)
    return tmp_path


def test_runs_are_compared_by_bytes_samples_and_virtual_time(call: Call, tmp_path: Path) -> None:
    fine(call("run", "small.yaml", "clock={}", "communication.downlink=overlap", "--out", "a"))
    for x in ("bytes", "samples", "virtual_seconds"):
        rows = json.loads(fine(call("compare", "a", "--x", x, "--target", "0.01", "--plot", f"{x}.png", "--json")))
        assert rows[0]["x"] == x and rows[0]["x_to_target"] > 0
        assert (tmp_path / f"{x}.png").read_bytes()[:8] == PNG
    refused(call("compare", "a", "--x", "byte", "--target", "0.99"), "did you mean 'bytes'")
    for table, name in (("selections", "covering"), ("downlinks", "overlap"), ("uplinks", "top_k")):
        assert name in fine(call("list", table))
