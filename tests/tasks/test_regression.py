"""Regression from data to figures: every method, the same bits on any number of workers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from conftest import numbers_federation
from fedadc.config.build import prepare
from fedadc.data import from_arrays, from_clients, from_torch
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import METHODS
from fedadc.models import MLP
from fedadc.objectives import CrossEntropy, SquaredError
from fedadc.runs.record import load_config
from fedadc.runs.runner import resume, run
from fedadc.selections import Covering
from fedadc.views.local_work import LocalWork


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A config of 40 clients with one number to predict, 300 times as large as what a model first says."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(800, 6)).astype(np.float32)
    y = 300 + 40 * x[:, 0] - 25 * np.abs(x[:, 1]) + rng.normal(size=800)
    np.savez(tmp_path / "numbers.npz", x=x, y=y, client=np.arange(800) % 40)
    return {
        "rounds": 6,
        "task": "regression",
        "data": {"name": "npz", "path": str(tmp_path / "numbers.npz")},
        "model": {"name": "mlp", "hidden": [8]},
        "local": {"steps": 4, "batch_size": 8, "lr": 0.1},
        "cohort": {"size": 12},
        "evaluate": {"every": 2, "metrics": ["per_target"]},
    }


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_to_predict_numbers(config: dict[str, Any], method: str) -> None:
    settings = {"name": method, "server_lr": 0.1} if method in ("fedadam", "fedyogi", "fedadagrad") else method
    metrics = ["per_target"] if method == "local_only" else ["per_target", "fairness"]  # all rows are everybody's
    evaluate = {"every": 2, "metrics": metrics}
    result = run(load_config({**config, "rounds": 12, "method": settings, "evaluate": evaluate}))
    last = result.history[-1]
    figures = {name: value for name, value in last.items() if name.startswith(("test_", "personal_"))}
    prefix = "test_" if "test_r2" in figures else "personal_"
    assert figures[f"{prefix}r2"] > 0.1, figures
    assert 0 < figures[f"{prefix}mae"] < 60 and figures[f"{prefix}mse"] >= figures[f"{prefix}mae"] ** 2
    assert figures[f"{prefix}per_target_mse"] == [figures[f"{prefix}mse"]]
    spread = {f"{prefix}mse_{name}" for name in ("worst", "p10", "mean", "spread")}
    assert spread <= figures.keys() or method == "local_only"


@pytest.mark.parametrize("method", ["fedadc", "scaffold", "ditto"])
def test_workers_change_no_bit(config: dict[str, Any], method: str) -> None:
    runs = [run(load_config({**config, "method": method}), workers=workers) for workers in (0, 2)]
    assert torch.equal(runs[0].state.theta, runs[1].state.theta)
    for a, b in zip(*(r.history for r in runs), strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}


def test_a_resumed_run_repeats_an_uninterrupted_one(config: dict[str, Any], tmp_path: Path) -> None:
    whole = run(load_config({**config, "method": "feddyn"}), out=tmp_path / "whole")
    run(load_config({**config, "method": "feddyn"}), out=tmp_path / "cut", until=3)
    rest = resume(tmp_path / "cut")
    assert torch.equal(whole.state.theta, rest.state.theta)
    assert [r.get("test_r2") for r in whole.history] == [r.get("test_r2") for r in rest.history]


def test_the_written_config_repeats_the_run(config: dict[str, Any]) -> None:
    plan = prepare(load_config(config))
    assert isinstance(plan.federation.method.objective, SquaredError)
    again = prepare(load_config(yaml.safe_load(plan.config.yaml())))
    assert again.config == plan.config and again.federation.data_checksum() == plan.federation.data_checksum()


def test_labels_are_scaled_by_the_training_rows_alone(config: dict[str, Any]) -> None:
    data = prepare(load_config(config)).federation.data
    (target,), y = data.targets, data.train.y.double().numpy()
    assert target.spread == float(f"{y.std():.6g}") and target.center == round(y.mean(), 4)
    assert data.test is not None and len(data.test) == 160


def test_the_constants_do_not_depend_on_the_order_of_the_rows() -> None:
    rng = np.random.default_rng(0)
    x, y, owners = rng.normal(size=(90, 3)), rng.normal(1e6, 3, size=(90, 2)), np.repeat(["c", "a", "b"], 30)
    order = rng.permutation(90)
    found = [
        Federation(
            model=MLP((3,), 2), data=from_arrays(x[o], y[o], owners=owners[o], task="regression"), test=0
        ).data.targets
        for o in (np.arange(90), order)
    ]
    assert found[0] == found[1] and abs(found[0][0].spread - 3) < 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "classes": ({"task": None}, "set task to regression"),
    "cross-entropy": ({"objective": "cross_entropy"}, "use squared_error"),
    "an accuracy": ({"stop": {"accuracy": 0.5}}, "stop.accuracy needs classes"),
    "label counts": (
        {"cohort": {"size": 5, "selection": "covering"}},
        "needs label counts, but the labels are numbers",
    ),
    "top5": ({"evaluate": {"metrics": ["top5"]}}, "top5 is no metric of regression; it has per_target, fairness"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_needs_classes_is_refused(config: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(FedadcError, match=words):
        prepare(load_config({**config, **change}))


@pytest.mark.parametrize("partition", ["sort", "dirichlet"])
def test_partitions_by_class_are_refused(config: dict[str, Any], partition: str) -> None:
    rng = np.random.default_rng(0)
    data = from_arrays(rng.normal(size=(50, 2)), rng.normal(size=50), task="regression")
    from fedadc.partitions import PARTITIONS

    with pytest.raises(FedadcError, match="deals by class, but the labels are numbers"):
        Federation(model=MLP((2,), 1), data=data, clients=5, partition=PARTITIONS[partition]())


def test_data_with_classes_is_no_regression() -> None:
    with pytest.raises(FedadcError, match="task is regression, but the labels of data digits are classes"):
        prepare(
            load_config({"rounds": 1, "task": "regression", "data": {"name": "digits", "clients": 2}, "model": "mlp"})
        )


def test_data_in_memory_says_its_task() -> None:
    data = numbers_federation()
    federation = Federation(model=MLP((5,), 2).double(), data=data, local=LocalWork(steps=1))
    assert isinstance(federation.method.objective, SquaredError)
    with pytest.raises(FedadcError, match="use squared_error"):
        Federation(model=MLP((5,), 2).double(), data=data, objective=CrossEntropy())
    with pytest.raises(FedadcError, match="needs label counts"):
        Federation(model=MLP((5,), 2).double(), data=data, selection=Covering())
    with pytest.raises(FedadcError, match=r"numbers of shape \[2, 2\] for 2 samples of 2 targets"):
        Federation(model=MLP((5,), 3).double(), data=data)


def test_a_torch_dataset_of_numbers() -> None:
    pairs = [(torch.randn(3), torch.randn(2)) for _ in range(6)]
    assert from_torch(pairs, task="regression").train.y.shape == (6, 2)
    scalars = [(x, y[:1]) for x, y in pairs]
    assert from_torch(scalars, task="regression").train.y.shape == (6, 1)


WRONG_LABELS: dict[str, tuple[Any, str]] = {
    "NaN": ([1.0, float("nan"), 2.0], "label of sample 1 is NaN"),
    "texts": (["a", "b", "c"], "labels must be numbers, not <U1"),
    "too deep": (np.zeros((3, 1, 1)), r"shape \[n\] or \[n, targets\]"),
    "too few": ([1.0, 2.0], "3 inputs do not match 2 labels"),
}


@pytest.mark.parametrize(("y", "words"), WRONG_LABELS.values(), ids=WRONG_LABELS)
def test_wrong_labels_are_named(y: Any, words: str) -> None:
    with pytest.raises(FedadcError, match=words):
        from_arrays(np.zeros((3, 2)), y, task="regression")


def test_numbers_as_classes_name_the_task() -> None:
    with pytest.raises(FedadcError, match="set task to regression"):
        from_arrays(np.zeros((3, 2)), [0.5, 1.5, 2.5])
    with pytest.raises(FedadcError, match="targets must be 1 different names"):
        from_arrays(np.zeros((3, 2)), [0.5, 1.5, 2.5], task="regression", targets=["a", "b"])
    with pytest.raises(FedadcError, match="2 numbers for every sample, not 1"):
        from_clients([(np.zeros((3, 2)), np.zeros((3, 2)))], (np.zeros((3, 2)), np.zeros(3)), task="regression")
