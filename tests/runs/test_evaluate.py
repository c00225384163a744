"""`fedadc evaluate` and its twin: by client, by class, on other rows, and what they refuse."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import fedadc
from commands import Call, fine, refused
from fedadc.errors import FedadcError
from fedadc.evaluation.metrics import EvaluationBatch

HOSPITALS = {"north": 60, "south": 30, "west": 45, "tiny": 4}
TREE: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "csv", "path": "heart.csv", "label": "state", "client": "hospital"},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.1},
    "evaluate": {"batch_size": 7},
}
NUMBERS = "auroc,average_precision,sensitivity,specificity,calibration_error,brier"


def table(path: Path, seed: int = 0, hospitals: dict[str, int] = HOSPITALS) -> Path:
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["age", "pulse", "hospital", "state"])
        for name, rows in hospitals.items():
            for row in range(rows):
                sick = row % 3 == 0
                writer.writerow([*(rng.normal(size=2) + 1.5 * sick).round(4), name, "sick" if sick else "healthy"])
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    data = {**TREE["data"], "path": str(table(folder / "heart.csv"))}
    fedadc.run({**TREE, "data": data}, out=folder / "run")
    fedadc.run({**TREE, "data": {"name": "digits", "clients": 9}}, out=folder / "digits")
    return folder


def test_every_client_has_the_figures_of_its_own_rows(folder: Path) -> None:
    result = fedadc.evaluate(folder / "run", by="client", metrics=["macro_f1", "auroc"])
    run = fedadc.load(folder / "run")
    data = run.federation.data
    assert data.test is not None and [*result.per_client] == ["north", "south", "tiny", "west"]
    owners, losses = np.asarray(data.test_owners), []
    for name, figures in result.per_client.items():
        rows = torch.from_numpy(np.flatnonzero(owners == name))
        logits, labels = run.federation.predict(run.federation.start(), data.test.x)[rows], data.test.y[rows]
        assert figures["samples"] == len(rows)
        assert figures["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
        assert figures["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
        losses.append(len(rows) * figures["loss"])
    assert sum(losses) / len(data.test) == pytest.approx(result["test"]["loss"], rel=1e-12)
    right = sum(figures["samples"] * figures["accuracy"] for figures in result.per_client.values())
    assert right / len(data.test) == pytest.approx(result["test"]["accuracy"])
    assert result.per_client["tiny"]["samples"] == 1 and result.per_client["tiny"]["auroc"] is None
    own = np.array([figures["accuracy"] for figures in result.per_client.values()])
    assert result.fairness["accuracy"]["worst"] == own.min() and result.fairness["accuracy"]["spread"] == own.std()
    assert "auroc" not in result.fairness  # it is not defined for every client


def test_without_further_arguments_the_result_is_what_it_was(folder: Path) -> None:
    result = fedadc.evaluate(folder / "run")
    assert result == {"test": {name: result["test"][name] for name in ("accuracy", "loss")}} and isinstance(
        result, dict
    )
    last = fedadc.load(folder / "run").history[-1]
    assert result["test"]["accuracy"] == last["test_accuracy"] and result["test"]["loss"] == last["test_loss"]


def test_two_lines_give_accuracies_of_clients_and_a_confusion_matrix(folder: Path) -> None:
    result = fedadc.evaluate(folder / "run", by="client")
    accuracies, confusion = result.to_frame()["accuracy"], result.confusion
    assert accuracies["north"] == result.per_client["north"]["accuracy"] and accuracies.index.name == "client"
    assert confusion.sum() == result.to_frame()["samples"].sum()
    assert np.trace(confusion) / confusion.sum() == result["test"]["accuracy"]
    sick = result.per_class["sick"]
    assert sick["support"] == confusion[1].sum() and sick["recall"] == confusion[1, 1] / confusion[1].sum()


def test_a_federation_reports_without_a_run_directory(folder: Path) -> None:
    result = fedadc.run(fedadc.load_config(folder / "run/config.yaml"))
    report = result.plan.federation.report(result.state, metrics=["auroc"])
    saved = fedadc.evaluate(folder / "run", by="client", metrics="auroc")
    assert report.per_client == saved.per_client and (report.confusion == saved.confusion).all()
    assert "SplitReport(test: 28 rows" in repr(report)
    with pytest.raises(FedadcError, match=r"split 'train' is unknown"):
        result.plan.federation.report(result.state, "train")


def test_the_history_of_a_run_is_a_data_frame(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = fedadc.load(folder / "run").history
    frame = history.to_pandas()
    assert isinstance(history, list) and isinstance(frame, pandas.DataFrame) and [*frame.index] == [1, 2, 3]
    assert [*frame["test_accuracy"]] == [record["test_accuracy"] for record in history]
    assert fedadc.run(fedadc.load_config(folder / "run/config.yaml"), "rounds=1").history.to_pandas().shape[0] == 1
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    with pytest.raises(
        FedadcError, match=r"^a DataFrame needs pandas; install it with `pip install 'fedadc\[pandas\]'`\.$"
    ):
        history.to_pandas()


def test_the_command_and_its_twin_agree(folder: Path, call: Call, tmp_path: Path) -> None:
    run = str(folder / "run")
    found = json.loads(fine(call("evaluate", run, "--by", "client", "--metrics", NUMBERS, "--intervals", "--json")))
    twin = fedadc.evaluate(run, metrics=NUMBERS.split(","), by="client", intervals=True)
    assert found == json.loads(json.dumps(twin.as_json())) and found["clients"] == twin.per_client
    for low, high in twin.intervals["test"].values():
        assert low <= high
    assert twin.intervals["test"]["accuracy"][0] <= twin["test"]["accuracy"] <= twin.intervals["test"]["accuracy"][1]
    rows = fedadc.evaluate(run, intervals=True)
    assert rows.intervals["test"]["loss"] != twin.intervals["test"]["loss"]  # over rows, not clients
    out = fine(call("evaluate", run, "--by", "class", "--confusion", "c.png", "-o", "classes.csv"))
    assert "confusion matrix" in out and "sick" in out and "written: classes.csv" in out
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "classes.csv").open(newline="") as stream:
        saved = {row["class"]: row for row in csv.DictReader(stream)}
    assert float(saved["sick"]["recall"]) == twin.per_class["sick"]["recall"] and [*saved] == ["healthy", "sick"]


def test_figures_of_each_target_in_its_own_units(call: Call, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    y = np.stack([300 + 50 * x[:, 0], 0.01 * x[:, 1]], axis=1)
    np.savez(tmp_path / "two.npz", x=x, y=y)
    data = {"name": "npz", "path": str(tmp_path / "two.npz"), "clients": 4}
    fedadc.run({**TREE, "task": "regression", "data": data, "rounds": 9}, out=tmp_path / "run")
    result = fedadc.evaluate(tmp_path / "run", by="target")
    federation = fedadc.load(tmp_path / "run").federation
    test = federation.data.test
    assert test is not None
    values = fedadc.predict(tmp_path / "run", test).values
    errors, deviations = values - test.y.numpy(), test.y.numpy() - test.y.numpy().mean(axis=0)
    for k, (name, row) in enumerate(result.per_target.items()):
        mse = float((errors[:, k] ** 2).mean())
        assert name == federation.data.targets[k].name and row["mse"] == pytest.approx(mse, rel=1e-5)
        assert row["rmse"] == pytest.approx(mse**0.5, rel=1e-5)
        assert row["mae"] == pytest.approx(float(np.abs(errors[:, k]).mean()), rel=1e-5)
        assert row["r2"] == pytest.approx(1 - mse / float((deviations[:, k] ** 2).mean()), rel=1e-4)
    found = json.loads(fine(call("evaluate", str(tmp_path / "run"), "--by", "target", "--json", "-o", "t.csv")))
    assert found["targets"] == result.per_target and list(result.to_frame().index) == [*result.per_target]
    with (tmp_path / "t.csv").open(newline="") as stream:
        saved = {row["target"]: float(row["mae"]) for row in csv.DictReader(stream)}
    assert saved == {name: row["mae"] for name, row in result.per_target.items()}
    out = fine(call("evaluate", str(tmp_path / "run"), "--by", "target"))
    assert "in units of each target" in out and "rmse" in out
    refused(
        call("evaluate", str(tmp_path / "run"), "--by", "class"),
        "by class needs classes, which regression does not have",
    )


def test_simulated_clients_have_shares_and_a_note_says_so(folder: Path, call: Call) -> None:
    answer = call("evaluate", str(folder / "digits"), "--by", "client")
    assert "note: the test rows name no clients; each client has a share of them" in answer.err
    assert "over clients" in fine(answer)
    result = fedadc.evaluate(folder / "digits", by="class", metrics="auroc")
    assert len(result.to_frame()) == 10 and result["test"]["auroc"] == pytest.approx(result.to_frame()["auroc"].mean())
    positive = fedadc.evaluate(folder / "digits", metrics=["auroc", "sensitivity"], positive="3")
    assert positive["test"]["auroc"] == result.per_class["3"]["auroc"]
    assert positive["test"]["sensitivity"] == result.per_class["3"]["recall"]


def test_other_rows_and_those_that_were_trained_on(folder: Path, call: Call, tmp_path: Path) -> None:
    run, heart = str(folder / "run"), folder / "heart.csv"
    answer = call("evaluate", run, "--data", str(heart), "--by", "client")
    fine(answer)
    assert "note: 111 of 139 rows of heart.csv are among the rows that the model was trained on" in answer.err
    new = table(tmp_path / "new.csv", seed=5, hospitals={"east": 20, "north": 10})
    answer = call("evaluate", run, "--data", str(new), "--by", "client", "--json", "--metrics", "fairness")
    found = json.loads(fine(answer))
    assert answer.err == "" and [*found["clients"]] == ["north", "east"]  # those that trained come first
    assert found["metrics"]["new.csv"]["accuracy_worst"] == found["fairness"]["accuracy"]["worst"]
    lines = [row.rsplit(",", 2)[0] + "," + row.rsplit(",", 1)[1] for row in new.read_text().splitlines()]
    (tmp_path / "anonymous.csv").write_text("\n".join(lines) + "\n")
    anonymous = str(tmp_path / "anonymous.csv")
    assert "accuracy" in fine(call("evaluate", run, "--data", anonymous))
    refused(call("evaluate", run, "--data", anonymous, "--by", "client"), "it has no column hospital", code=5)
    refused(call("evaluate", run, "--data", anonymous, "--metrics", "fairness"), "it has no column hospital", code=5)
    (tmp_path / "unlabeled.csv").write_text("age,pulse,hospital\n1,2,north\n")
    refused(call("evaluate", run, "--data", str(tmp_path / "unlabeled.csv"), "--by", "class"), "column state", code=5)


def test_a_dataframe_has_the_figures_of_its_file(folder: Path, tmp_path: Path) -> None:
    new = table(tmp_path / "new.csv", seed=3)
    frame = pandas.read_csv(new)
    of_file = fedadc.evaluate(folder / "run", new, by="client", metrics=["auroc"])
    for data in (frame, {name: frame[name].tolist() for name in frame}):
        found = fedadc.evaluate(folder / "run", data, by="client", metrics=["auroc"])
        assert found["data"] == of_file["new.csv"] and found.per_client == of_file.per_client
    with pytest.raises(FedadcError, match=r"^data lacks the column state\.$"):
        fedadc.evaluate(folder / "run", frame.drop(columns="state"))
    with pytest.raises(FedadcError, match=r"data must be a path, a DataFrame or columns by name, not int\.$"):
        fedadc.evaluate(folder / "run", 7)
    with pytest.raises(FedadcError, match="data has columns by name, but the model was not trained on a table"):
        fedadc.evaluate(folder / "digits", frame)
    (tmp_path / "img").mkdir()
    with pytest.raises(FedadcError, match=r"img is a folder, but the model was trained on a table; give a CSV file\.$"):
        fedadc.evaluate(folder / "run", tmp_path / "img")


@pytest.mark.parametrize("method", ["fedper", "local_only", "fedbn"])
def test_own_models_are_judged_on_their_clients_rows(method: str, tmp_path: Path) -> None:
    """The whole equals what training has recorded; every client's figures are those of its model alone."""
    tree: dict[str, Any] = {**TREE, "method": method, "cohort": {"size": 4}, "data": {"name": "digits", "clients": 6}}
    if method == "fedbn":
        (tmp_path / "tiny_norm.py").write_text(
            "from torch import nn\n\n\ndef tiny(input_shape, classes):\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))\n"
        )
        tree["model"] = "tiny_norm:tiny"
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    ran = fedadc.run(tmp_path / "config.yaml", trust=True, out=tmp_path / "run")
    result = fedadc.evaluate(tmp_path / "run", by="client", metrics=["auroc"], trust=True)
    found, last = result["personal test"], ran.history[-1]
    if method != "local_only":  # whose records are of every model on all rows
        assert found["accuracy"] == last["personal_accuracy"]
        assert found["loss"] == pytest.approx(last["personal_loss"], rel=1e-12)
    assert 0.5 < float(str(found["auroc"])) <= 1
    federation, state, total = ran.plan.federation, ran.state, 0.0
    assert len(result.per_client) == 6
    for client, row in enumerate(result.per_client.values()):
        own, keeps = federation.local_tests[client], federation.method
        kept = state.clients[client] if client in state.clients else keeps.client_state(state.theta)
        theta = keeps.personal(state.theta, kept)
        outputs, labels = federation.counter.outputs(theta, EvaluationBatch("test", 0, 0), own)
        right = (outputs.argmax(1) == labels).double().mean().item()
        assert (row["samples"], row["accuracy"]) == (len(own), pytest.approx(right, rel=1e-12))
        total += right * len(own)
    assert found["accuracy"] == pytest.approx(total / sum(row["samples"] for row in result.per_client.values()))
    if method == "fedbn":
        with pytest.raises(FedadcError, match="no global model that could predict, because each client has its own"):
            fedadc.predict(tmp_path / "run", np.zeros((2, 1, 8, 8), np.uint8), trust=True)
        own = fedadc.load(tmp_path / "run", client=0, trust=True).predict(np.zeros((2, 1, 8, 8), np.uint8))
        assert own.outputs.shape == (2, 10)
    with pytest.raises(FedadcError, match="has clients' own models only, each judged on its client's held-out rows"):
        fedadc.evaluate(tmp_path / "run", tmp_path)


def test_the_clients_of_an_npz_file(folder: Path, tmp_path: Path) -> None:
    digits = fedadc.load(folder / "digits").federation.data.test
    assert digits is not None
    x, y = digits.x[:30].numpy(), digits.y[:30].numpy()
    np.savez(tmp_path / "new.npz", x=x, y=y, client=np.arange(30) % 2)
    result = fedadc.evaluate(folder / "digits", tmp_path / "new.npz", by="client")
    assert {name: row["samples"] for name, row in result.per_client.items()} == {"0": 15, "1": 15}
    np.savez(tmp_path / "bare.npz", x=x, y=y)
    with pytest.raises(FedadcError, match="does not say whose its rows are; the training data names none either"):
        fedadc.evaluate(folder / "digits", tmp_path / "bare.npz", by="client")


def test_existing_files_are_kept_and_no_folder_is_made(folder: Path, call: Call, tmp_path: Path) -> None:
    words = ("evaluate", str(folder / "run"), "--by", "client")
    for option, file in (("--out", tmp_path / "x.csv"), ("--confusion", tmp_path / "x.png")):
        file.write_text("mine")
        refused(call(*words, option, str(file)), "already exists; choose another")
        assert file.read_text() == "mine"
        refused(call(*words, option, str(tmp_path / "no" / file.name)), "there is no folder")
        assert not (tmp_path / "no").exists()
        fine(call(*words, option, str(file), "--overwrite"))
        assert file.read_bytes() != b"mine"
    with pytest.raises(FedadcError, match="already exists"):
        fedadc.evaluate(folder / "run", by="client").per_client.write_csv(tmp_path / "x.csv")


@pytest.mark.parametrize("rounds", [2, 8])
def test_the_best_model_has_rows_of_its_own_unless_it_is_the_last_one(rounds: int, call: Call, tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 9, "validation": 0.2}
    local = {"steps": 8, "batch_size": 16, "lr": 0.1 if rounds == 2 else 8.0}  # diverges after its best round
    ran = fedadc.run({**TREE, "data": data, "rounds": rounds, "local": local}, out=tmp_path / "run")
    assert ran.best is not None and (ran.best.round == rounds) == (rounds == 2)
    text = fine(call("evaluate", str(tmp_path / "run")))
    assert ("best test" in text) == (rounds == 8) and ("the best model is the last one" in text) == (rounds == 2)
    assert "best test" in json.loads(fine(call("evaluate", str(tmp_path / "run"), "--json")))


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--by", "clients"], "--by must be client, class or target, not 'clients'"),
        (["--by", "target"], "by target needs task: regression"),
        (["--metrics", "aurok"], "metric 'aurok' is unknown; did you mean 'auroc'?"),
        (["--positive", "sik", "--metrics", "auroc"], "class 'sik' is unknown; did you mean 'sick'?"),
        (["--out", "x.csv"], "--out needs --by client, class or target"),
        (["--by", "class", "--out", "x.txt"], "x.txt should end in .csv"),
        (["--confusion", "x.pdf"], "x.pdf should end in .png"),
    ],
)
def test_mistakes_are_one_sentence(folder: Path, call: Call, words: list[str], fragment: str) -> None:
    refused(call("evaluate", str(folder / "run"), *words), fragment)


def test_further_mistakes(folder: Path) -> None:
    result = fedadc.evaluate(folder / "run")
    with pytest.raises(FedadcError, match=r"client 'nort' is unknown; did you mean 'north'\?"):
        result.per_client["nort"]
    with pytest.raises(FedadcError, match=r"class 'ill' is unknown; choose from: healthy, sick"):
        result.per_class["ill"]
    with pytest.raises(FedadcError, match=r"split 'train' is unknown; .* test"):
        result.report("train")
    with pytest.raises(FedadcError, match=r"^sensitivity needs two classes or a positive one, but there are 10"):
        fedadc.evaluate(folder / "digits", metrics="sensitivity")
    x, y = np.random.default_rng(0).normal(size=(40, 5)), np.arange(40) % 2
    bare = fedadc.Federation(model=torch.nn.Linear(5, 2).double(), data=fedadc.from_arrays(x, y), clients=4, test=0)
    with pytest.raises(FedadcError, match=r"^data \S+ has held out no rows to report on\.$"):
        bare.report(bare.start())
