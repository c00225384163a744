"""Metrics of personal models on local test shares: against an independent count, and as a user sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.nn.utils import vector_to_parameters

from commands import SMALL, Call, fine, records, refused
from conftest import small_federation
from fedadc.data import Dataset
from fedadc.data.dataset import Samples
from fedadc.data.shares import local_shares
from fedadc.errors import FedadcError
from fedadc.evaluation.metrics import Evaluation
from fedadc.federation import Federation
from fedadc.methods import METHODS, Ditto, FedAvg, FedPer, FedRep, Method
from fedadc.models import MLP
from fedadc.rng import generator
from fedadc.runs.runner import run
from fedadc.studies.experiment import read_experiment
from fedadc.tasks import Classification
from fedadc.views.local_work import LocalWork

PERSONALIZED = [name for name, cls in METHODS.items() if cls.personalized]


def data() -> Dataset:
    """A data set with validation samples, and with more test samples than one evaluation batch."""
    rng = np.random.default_rng(7)
    held = [
        Samples(torch.from_numpy(rng.normal(size=(n, 5))), torch.from_numpy(rng.integers(4, size=n))) for n in (90, 30)
    ]
    return replace(small_federation(), test=held[0], validation=held[1])


def federation(method: Method, data: Dataset, **kw: Any) -> Federation:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"evaluate": Evaluation(batch_size=7), "seed": 5, "cohort": 2, **kw}
    work = LocalWork(steps=4, batch_size=4, lr=0.3)
    return Federation(model=MLP((5,), 4, [7]).double(), data=data, method=method, local=work, **settings)


@pytest.mark.parametrize("method", [FedPer(), FedRep(), Ditto()], ids=lambda m: type(m).__name__)
def test_each_test_sample_is_evaluated_with_the_model_of_its_client(method: Method) -> None:
    """Recomputed with plain torch modules and the shares; clients that were never selected have their initial state."""
    made = federation(method, data(), data_seed=9)
    samples, module = made.data, MLP((5,), 4, [7]).double()
    counts = made.clients.class_counts(samples.train.y, 4)
    for done in made.rounds(3):
        assert done.round > 1 or len(done.state.clients) == 2
        for split, prefix in (("test", ""), ("validation", "validation_")):
            held = samples.splits()[split]
            shares = local_shares(held.y.numpy(), counts, generator(9, f"local {split} shares"))
            right, losses = 0, []
            for k in range(6):
                own = done.state.clients[k] if k in done.state.clients else method.client_state(done.state.theta)
                vector_to_parameters(method.personal(done.state.theta, own), module.parameters())
                mine = held.take(shares[k])
                with torch.no_grad():
                    logits = module(mine.x)
                right += int((logits.argmax(dim=1) == mine.y).sum())
                losses += torch.nn.functional.cross_entropy(logits, mine.y, reduction="none").tolist()
            assert len(losses) == len(held)
            assert done.metrics[f"{prefix}personal_accuracy"] == right / len(losses)
            assert done.metrics[f"{prefix}personal_loss"] == pytest.approx(np.mean(losses), rel=1e-12)


def test_local_test_shares_are_available_and_need_test_samples() -> None:
    made = federation(FedAvg(), data())
    assert made.local_tests is made.local_tests and len(made.local_tests) == 6
    assert sorted(made.local_tests.indices.tolist()) == list(range(90))
    with pytest.raises(FedadcError, match="has no test samples to share out"):
        _ = federation(FedAvg(), replace(small_federation(), test=None), test=0).local_tests


@pytest.mark.parametrize("name", METHODS)
def test_each_method_has_the_metrics_of_its_models(name: str) -> None:
    """Global metrics with a global model (local_only: the mean over its models), personal ones with personal models."""
    evaluate = Evaluation(metrics=Classification.extra_metrics)
    last = list(federation(METHODS[name](), data(), evaluate=evaluate).rounds(2))[-1]
    kinds = {key.replace("validation_", "").replace("test_", "") for key in last.metrics}
    measured = {"accuracy", "loss", *Classification.extra_metrics}
    expected = set() if name in ("fedper", "fedrep", "fedbn") else measured
    if name in ("fedper", "fedrep", "fedbn", "ditto"):
        expected = expected | {f"personal_{metric}" for metric in measured}
    assert expected <= kinds and not any("personal" in key for key in kinds - expected)
    assert ("test_accuracy" in last.metrics) == ("accuracy" in expected)


@pytest.mark.parametrize("name", PERSONALIZED)
def test_without_test_samples_there_are_no_metrics(name: str) -> None:
    last = list(federation(METHODS[name](), replace(small_federation(), test=None), test=0).rounds(2))[-1]
    assert last.metrics == {}


def test_one_model_for_all_gives_the_accuracy_of_the_test_set() -> None:
    """Shares are disjoint and cover all test samples, so with one model personal and test accuracy are equal."""

    class Shown(FedAvg):
        personalized = True

    for done in federation(Shown(), data()).rounds(2):
        assert done.metrics["personal_accuracy"] == done.metrics["test_accuracy"]
        assert done.metrics["personal_loss"] == pytest.approx(done.metrics["test_loss"], rel=1e-12)


def test_a_run_stops_when_personal_models_reach_the_accuracy() -> None:
    """FedPer stops by personal accuracy, on validation data if there is any; Ditto by its global model, as FedAvg."""
    rounds = list(federation(FedPer(), data()).rounds(6))
    curve = [r.metrics["validation_personal_accuracy"] for r in rounds]
    goal = sorted(curve)[2]
    first = next(t for t, value in enumerate(curve, start=1) if value >= goal)
    assert len(list(federation(FedPer(), data()).rounds(6, stop_at_accuracy=goal))) == first < 6
    ditto, fedavg = (list(federation(m, data()).rounds(6, stop_at_accuracy=0.4)) for m in (Ditto(), FedAvg()))
    assert len(ditto) == len(fedavg)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbn"])
def test_runs_with_personal_heads_report_personal_accuracy(name: str, call: Call, tmp_path: Path) -> None:
    printed = fine(call("run", "small.yaml", f"method={name}", "--out", "a"))
    last = records(tmp_path / "a")[-1]
    assert f"personal accuracy {last['personal_accuracy']:.4f}" in printed and "test accuracy" not in printed
    assert "test_accuracy" not in last and (tmp_path / "a/model.safetensors").is_file()
    refused(call("compare", "a"), "it has lr, personal_accuracy")
    (row,) = json.loads(fine(call("compare", "a", "--metric", "personal_accuracy", "--json")))
    assert row["best"] >= row["value"] > 0
    evaluated = json.loads(fine(call("evaluate", "a", "--json")))["personal test"]
    assert evaluated["accuracy"] == pytest.approx(last["personal_accuracy"], abs=1e-12)


def test_resuming_a_finished_run_does_not_evaluate_again(tmp_path: Path) -> None:
    config = {**SMALL, "method": "fedper"}
    run(config, out=tmp_path / "a")
    before = (tmp_path / "a/metrics.jsonl").read_bytes()
    run(config, out=tmp_path / "a", resume=True)
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == before


EXPERIMENT: dict[str, Any] = {
    "title": "personal", "seeds": [0], "budget": 2, "choose_by": "validation_personal_accuracy",
    "base": {"rounds": 3, "data": {"name": "digits", "clients": 10, "validation": 0.2,
                                   "partition": {"name": "sort", "labels_per_client": 2}},
             "model": {"name": "mlp", "hidden": [8]}, "local": {"steps": 3}, "cohort": {"size": 5}},
    "runs": {name: {"set": {"method": name}, "grid": {"local.lr": [0.1, 0.2]}} for name in ("fedper", "ditto")},
}  # fmt: skip


def test_an_experiment_chooses_by_personal_models_and_shows_them(call: Call, tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    rows = json.loads(fine(call("experiment", "e.yaml", "--out", "e", "--jobs", "2", "--json")))
    assert [row["metric"] for row in rows] == ["personal_accuracy"] * 2
    assert "validation_personal_accuracy" in json.loads((tmp_path / "e/choices.json").read_text())["fedper"]


@pytest.mark.parametrize(("choose_by", "method"), [("validation_accuracy", "fedper"), ("personal_accuracy", "ditto"),
                                                  ("validation_personal_accuracy", "fedavg")])  # fmt: skip
def test_an_experiment_refuses_a_choose_by_that_is_not_measured(choose_by: str, method: str, tmp_path: Path) -> None:
    runs = {"one": {"set": {"method": method}, "grid": {"local.lr": [0.1, 0.2]}}}
    (tmp_path / "e.yaml").write_text(yaml.safe_dump({**EXPERIMENT, "choose_by": choose_by, "runs": runs}))
    with pytest.raises(FedadcError, match=rf"{choose_by} is not measured by runs\.one|never chosen on test data"):
        read_experiment(tmp_path / "e.yaml")
