"""Every command has a twin in Python: it returns values and prints nothing, and the two agree."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import fedadc
from commands import Call, fine, refused
from conftest import small_federation
from fedadc.cli.app import app
from fedadc.cluster.doctor import examine
from fedadc.errors import FedadcError
from fedadc.sites.app import write_app
from fedadc.sites.certificates import Certificates
from fedadc.sites.doctor import examine_federation
from fedadc.sites.overview import federation_status
from fedadc.sites.pinning import become_pinned_site, checksum_of_app
from fedadc.sites.trial import end_processes, train_on_this_machine

TREE: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "digits", "clients": 8, "validation": 0.2},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"steps": 2, "batch_size": 16, "lr": 0.1},
    "cohort": {"size": 4},
}
EXPERIMENT = {
    "title": "a small one",
    "base": TREE,
    "runs": {"FedAvg": {"grid": {"local.lr": [0.05, 0.1]}}},
    "seeds": [0],
    "budget": 2,
}
TWINS = {
    "run": fedadc.run,
    "resume": fedadc.resume,
    "demo": fedadc.demo,
    "compare": fedadc.compare,
    "experiment": fedadc.experiment,
    "sweep": fedadc.sweep,
    "reproduce": fedadc.reproduce,
    "doctor": examine,
    "evaluate": fedadc.evaluate,
    "personalize": fedadc.personalize,
    "predict": fedadc.predict,
    "export": fedadc.export,
    "list": fedadc.catalog,
    "init": fedadc.init,
    "federation init": write_app,
    "federation up": train_on_this_machine,
    "federation certificates": Certificates.create,
    "federation status": federation_status,
    "federation doctor": examine_federation,
    "federation checksum": checksum_of_app,
    "federation site": become_pinned_site,
    "federation down": end_processes,
    "data get": fedadc.download,
    "data show": fedadc.label_counts,
}


def test_every_command_has_a_twin() -> None:
    import typer

    root: Any = typer.main.get_command(app)
    groups = {name: list(command.commands) for name, command in root.commands.items() if hasattr(command, "commands")}
    names = {name for name in root.commands if name not in groups}
    assert names | {f"{group} {name}" for group, found in groups.items() for name in found} == TWINS.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of different seeds and an experiment file."""
    folder = tmp_path_factory.mktemp("twins")
    for seed in (0, 1):
        fedadc.run({**TREE, "seed": seed}, out=folder / f"runs/{seed}")
    (folder / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    (folder / "config.yaml").write_text(yaml.safe_dump(TREE))
    return folder


@pytest.fixture
def silent(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing is printed."""
    yield
    written = capfd.readouterr()
    assert written.out == "" and written.err == ""


@pytest.mark.usefixtures("silent")
def test_twins_print_nothing(folder: Path, tmp_path: Path) -> None:
    runs = [folder / "runs/0", folder / "runs/1"]
    table = fedadc.compare(folder / "runs")
    assert [row.seeds for row in table] == [2] and len(table) == 1
    assert table.plot(tmp_path / "a.png").stat().st_size > 1000
    assert {*fedadc.evaluate(runs[0])} == {"test", "validation", "best test", "best validation"}
    assert fedadc.evaluate(runs[0], metrics="top5")["test"]["top5"] >= fedadc.evaluate(runs[0])["test"]["accuracy"]
    assert len(fedadc.personalize(runs[0], out=tmp_path / "personal").rows) == 1
    assert "fedadc" in {entry.name for entry in fedadc.catalog("methods")}
    assert fedadc.init(tmp_path / "new.yaml") == tmp_path / "new.yaml"
    counts = fedadc.label_counts(folder / "config.yaml", "data.clients=5")
    assert counts.counts.shape == (5, 10) and counts.counts.sum() == counts.parts["train"]
    again = fedadc.resume(runs[1])
    assert again.state.round == 3
    seen: list[Any] = []
    result = fedadc.experiment(folder / "experiment.yaml", out=tmp_path / "x", jobs=1, watch=seen.append)
    assert (seen[0].ended, seen[-1].ended, seen[-1].runs) == (0, 2, 2)
    assert result.comparison is not None and len(result.choices) == 1 and (tmp_path / "x/convergence.png").exists()


def test_a_comparison_prints_as_its_table(folder: Path) -> None:
    first, *rows = repr(fedadc.compare([folder / "runs/0", folder / "runs/1"], target=0.2)).split("\n")
    assert first.split("  ")[0] == "run" and "to 0.2" in first and len(rows) == 1 and "fedavg" in rows[0]


def test_a_command_and_its_twin_agree(folder: Path, call: Call) -> None:
    found = json.loads(fine(call("evaluate", str(folder / "runs/0"), "--json")))
    assert found == fedadc.evaluate(folder / "runs/0")
    rows = json.loads(fine(call("compare", str(folder / "runs"), "--json")))
    assert [row["value"] for row in rows] == [row.value for row in fedadc.compare(folder / "runs")]


def test_messages_name_arguments_as_the_caller_wrote_them(folder: Path, call: Call, tmp_path: Path) -> None:
    run = str(folder / "runs/0")
    with pytest.raises(FedadcError, match=r"^target must be a share such as 0\.9, not 90\."):
        fedadc.compare(run, target=90)
    refused(call("compare", run, "--target", "90"), "--target must be a share such as 0.9")
    with pytest.raises(FedadcError, match="choose another `out`, or use `resume` to"):
        fedadc.run(TREE, out=run)
    refused(call("run", "small.yaml", "--out", run), "choose another --out, or use --resume to")
    with pytest.raises(FedadcError, match=r"^device must be auto, cpu"):
        fedadc.evaluate(run, device="gpu")
    refused(call("evaluate", run, "--device", "gpu"), "--device must be auto, cpu")
    with pytest.raises(FedadcError, match=r"^x 'rounds' is unknown"):
        fedadc.compare(run, x="rounds")
    refused(call("compare", run, "--x", "rounds"), "--x 'rounds' is unknown")
    with pytest.raises(FedadcError, match=r"^clients must be at least 1, not 0"):
        fedadc.Federation(model=torch.nn.Linear(5, 4).double(), data=fedadc.from_arrays(X, Y), clients=0)
    refused(call("run", "small.yaml", "data.clients=0"), "data.clients must be at least 1, not 0")
    with pytest.raises(FedadcError, match=r"^cohort is 9, but there are only 6 clients"):
        fedadc.Federation(model=torch.nn.Linear(5, 4).double(), data=small_federation(), cohort=9)
    refused(call("run", "small.yaml", "cohort.size=99"), "cohort.size is 99, but there are only 10 clients")


X, Y = np.random.default_rng(0).normal(size=(40, 5)), np.arange(40) % 4


def test_load_gives_the_trained_model_back(folder: Path) -> None:
    loaded = fedadc.load(folder / "runs/0")
    data = loaded.federation.data
    assert data.test is not None and loaded.classes == data.classes and loaded.history[-1]["round"] == 3
    logits = loaded.logits(data.test.x)
    assert (loaded.predict(data.test.x).classes == np.array(loaded.classes)[logits.argmax(1)]).all()
    accuracy = float((logits.argmax(1) == data.test.y).double().mean())
    assert accuracy == loaded.history[-1]["test_accuracy"]
    inputs = data.test.x.float() / data.normalization.scale
    assert not loaded.module.training and torch.allclose(loaded.module(inputs), logits, atol=1e-5)
    with pytest.raises(FedadcError, match=r"x has inputs \[3\] of type"):
        loaded.logits(np.zeros((2, 3), dtype=np.float32))
    with pytest.raises(FedadcError, match=r"no model-ema\.safetensors"):
        fedadc.load(folder / "runs/0", model="ema")


def federation(method: fedadc.methods.Method | None = None, **kw: Any) -> fedadc.Federation:
    torch.manual_seed(0)
    work = fedadc.LocalWork(steps=2, batch_size=4)
    model = fedadc.models.MLP((5,), 4, [6]).double()
    return fedadc.Federation(model=model, data=small_federation(), method=method, local=work, **kw)


def test_a_federation_evaluates_and_predicts() -> None:
    trained = federation()
    *_, last = trained.rounds(3)
    test = trained.data.test
    assert test is not None and trained.evaluate(last.state) == last.metrics
    logits = trained.predict(last.state, test.x)
    assert float((logits.argmax(1) == test.y).double().mean()) == last.test_accuracy
    assert torch.equal(trained.predict(last.state, test.x.numpy().tolist()), logits)
    assert trained.predict(last.state, test.x[:0]).shape == (0, 4)
    with pytest.raises(FedadcError, match="state must be a RunState"):
        trained.predict(last, test.x)  # type: ignore[arg-type]
    with pytest.raises(FedadcError, match="FedAvg has no clients' own models"):
        trained.predict(last.state, test.x, client=0)


def test_a_client_predicts_with_its_own_model() -> None:
    trained = federation(fedadc.methods.FedPer())
    *_, last = trained.rounds(3)
    x = trained.data.train.x[:7]
    own = [trained.predict(last.state, x, client=k) for k in (0, 1)]
    assert not torch.equal(*own) and torch.equal(trained.predict(last.state, x, client="1"), own[1])
    with pytest.raises(FedadcError, match="FedPer has no global model that could predict; give client="):
        trained.predict(last.state, x)
    with pytest.raises(FedadcError, match="client '6' is unknown; choose from: 0, 1, 2, 3, 4, 5"):
        trained.predict(last.state, x, client=6)


def test_the_objective_stands_beside_the_method() -> None:
    beside = federation(fedadc.methods.FedADC(), objective=fedadc.objectives.SelfConfidence(lam=0.5))
    with pytest.warns(DeprecationWarning, match="give the objective beside the method") as caught:
        inside = federation(fedadc.methods.FedADC(objective=fedadc.objectives.SelfConfidence(lam=0.5)))
    assert caught[0].filename == __file__, "a script shows the warning"
    a, b = (list(f.rounds(2))[-1].state.theta for f in (beside, inside))
    assert torch.equal(a, b)
    with pytest.raises(FedadcError, match=r"objective is CrossEntropy\(\), but the method has SelfConfidence"):
        federation(inside.method, objective=fedadc.objectives.CrossEntropy())


def test_arguments_of_a_federation_under_their_old_names_warn() -> None:
    with pytest.warns(DeprecationWarning, match="partition_by=.* is now partition="):
        assert len(federation(partition_by=fedadc.partitions.IID(), clients=3).clients) == 3
    with pytest.warns(DeprecationWarning, match="evaluation=.* is now evaluate="):
        assert federation(evaluation=fedadc.evaluation.Evaluation(every=7)).evaluation.every == 7
    with pytest.raises(TypeError, match="partitions"):
        federation(partitions=3)


def test_an_exception_in_a_watcher_is_reported_and_the_run_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def watch(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise ValueError("my plot is broken")

    with caplog.at_level(logging.INFO, "fedadc"), pytest.raises(ValueError, match="my plot is broken") as caught:
        fedadc.run({**TREE, "rounds": 4}, out=tmp_path / "a", watch=watch)
    assert caught.value.__notes__ == ["raised by `watch` after round 2"]
    assert "is saved at round 2 of 4" in caplog.text
    resumed, whole = fedadc.resume(tmp_path / "a"), fedadc.run({**TREE, "rounds": 4})
    assert torch.equal(resumed.state.theta, whole.state.theta)


def test_data_without_test_samples_gets_a_test_share_as_on_the_command_line() -> None:
    held = fedadc.Federation(model=torch.nn.Linear(5, 4).double(), data=fedadc.from_arrays(X, Y), clients=4, seed=3)
    expected = fedadc.data.HeldOut(0.2, seed=3)(fedadc.from_arrays(X, Y))
    assert held.data.test is not None and expected.test is not None and len(held.data.test) == 8
    assert torch.equal(held.data.test.x, expected.test.x)
    both = fedadc.Federation(
        model=torch.nn.Linear(5, 4).double(), data=fedadc.from_arrays(X, Y), clients=4, test=0.5, validation=0.2
    )
    assert [len(s) for s in both.data.splits().values()] == [16, 4, 20]
    with pytest.raises(FedadcError, match="already has test data; remove test"):
        fedadc.Federation(model=torch.nn.Linear(5, 4).double(), data=small_federation(), test=0.2)


@pytest.mark.parametrize(
    "wrong",
    [{"clients": 5.5}, {"clients": True}, {"seed": "1"}, {"data_seed": 1.5}, {"cohort": "3"}, {"test": "a"},
     {"validation": 2}, {"evaluate": 1}, {"partition": "iid"}, {"objective": "mse"}, {"selection": "uniform"}],
    ids=str,
)  # fmt: skip
def test_a_wrong_argument_is_one_sentence_that_names_it(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(FedadcError, match=f"^{name} must be "):
        fedadc.Federation(
            model=torch.nn.Linear(5, 4).double(), data=fedadc.from_arrays(X, Y), **{"clients": 4, **wrong}
        )
    with pytest.raises(FedadcError, match=r"^stop_at_accuracy must be"):
        federation().rounds(3, stop_at_accuracy="x")  # type: ignore[arg-type]


def test_clients_may_have_names() -> None:
    pairs = {"north": (X[:20], Y[:20]), "south": (X[20:], Y[20:])}
    data = fedadc.from_clients(pairs, tests={"south": (X[:2], Y[:2]), "north": (X[2:5], Y[2:5])})
    named = fedadc.Federation(model=torch.nn.Linear(5, 4).double(), data=data)
    assert named.client_names == ("north", "south") and named.local_tests.sizes.tolist() == [3, 2]
    alone = fedadc.data.HeldOut(0.3)(fedadc.from_clients({"south": pairs["south"]}))
    both = fedadc.data.HeldOut(0.3)(fedadc.from_clients(pairs))
    assert alone.test is not None and both.test is not None
    of_south = both.test.x[torch.from_numpy(np.asarray(both.test_owners) == "south")]
    assert torch.equal(of_south, alone.test.x)  # another client changes nothing
    with pytest.raises(FedadcError, match="the same client names"):
        fedadc.from_clients(pairs, tests={"north": (X[:2], Y[:2])})
    with pytest.raises(FedadcError, match=r"client 0 must be a pair \(inputs, labels\), not ndarray"):
        fedadc.from_clients([X, Y])  # type: ignore[list-item]


def test_the_namespace_of_runs() -> None:
    assert fedadc.runs.Checkpoints.__name__ == "Checkpoints"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: fedadc.run(3), "a config must be a file, a mapping or a Config, not 3"),  # type: ignore[arg-type]
        (lambda: fedadc.run(TREE, out=3), "out must be a path, not 3"),  # type: ignore[arg-type]
        (lambda: list(federation().rounds(True)), "rounds must be a whole number"),
        (lambda: federation(partition=None, partition_by=fedadc.partitions.IID()), "are the same argument"),
    ],
)
def test_further_mistakes_are_one_sentence(wrong: Any, words: str) -> None:
    with pytest.raises(FedadcError, match=words):
        wrong()


def test_one_override_is_a_text() -> None:
    assert fedadc.load_config(TREE, "rounds=7").rounds == 7
    assert len(list(federation().rounds(np.int64(2)))) == 2  # type: ignore[arg-type]
