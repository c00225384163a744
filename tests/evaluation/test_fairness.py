"""Fairness over clients: hand-computed figures, and the same ones in every round wherever rows are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedadc
from commands import records
from conftest import small_federation
from fedadc.errors import FedadcError
from fedadc.evaluation.fairness import client_sums, fairness_of_sums, spread_over_clients
from fedadc.tasks import Classification, Regression, Target

NAMES = ("north", "south", "west")


def test_the_spread_of_eleven_clients_by_hand() -> None:
    found = spread_over_clients(np.arange(11) / 10)
    assert found == pytest.approx({"worst": 0.0, "p10": 0.1, "mean": 0.5, "spread": 0.1 * np.sqrt(10)})
    errors = spread_over_clients(np.arange(11) / 10, higher_is_better=False)
    assert errors["worst"] == 1.0 and errors["p10"] == pytest.approx(0.9)
    assert spread_over_clients(np.array([0.25])) == {"worst": 0.25, "p10": 0.25, "mean": 0.25, "spread": 0.0}


def test_counts_of_any_cuts_give_the_figures_of_every_client() -> None:
    rng = np.random.default_rng(0)
    owner, right = rng.integers(-1, 7, size=200), rng.random(200) < 0.6
    accuracies = np.array([right[owner == k].mean() for k in range(7)])
    expected = {f"accuracy_{name}": value for name, value in spread_over_clients(accuracies).items()}
    for size in (1, 33, 200):
        parts = [client_sums(owner[i : i + size], right[i : i + size]) for i in range(0, 200, size)]
        assert fairness_of_sums(parts, Classification) == expected
    assert fairness_of_sums([client_sums(np.array([-1]), np.array([1.0]))], Classification) == {}


def test_errors_of_a_regression_by_client() -> None:
    """Of errors the largest is the worst, and each client's is its own MSE, however rows are cut into batches."""
    rng = np.random.default_rng(0)
    owner, outputs = rng.integers(-1, 7, size=200), torch.from_numpy(rng.normal(size=(200, 2)))
    y, task = torch.from_numpy(rng.normal(3, 2, size=(200, 2))), Regression((Target("a", 3.0, 2.0), Target("b")))
    errors = ((task.predicted(outputs) - y.numpy()) ** 2).mean(axis=1)
    expected = spread_over_clients(np.array([errors[owner == k].mean() for k in range(7)]), higher_is_better=False)
    assert expected["worst"] > expected["p10"] > expected["mean"]
    for size in (1, 33, 200):
        cuts = [slice(i, i + size) for i in range(0, 200, size)]
        parts = [client_sums(owner[cut], task.sample_values(outputs[cut], y[cut])) for cut in cuts]
        found = fairness_of_sums(parts, task)
        assert found == pytest.approx({f"mse_{name}": value for name, value in expected.items()}, rel=1e-12)
    whole = task.sample_total(task.counted(outputs, y))
    assert whole == pytest.approx(errors.sum(), rel=1e-12)
    assert whole / 200 == pytest.approx(task.metrics(task.counted(outputs, y), [])["mse"], rel=1e-12)


def hospitals(rows: int = 60) -> fedadc.Dataset:
    """Three clients of unequal size and different noise, with their own test rows; one of them has a single one."""
    rng = np.random.default_rng(1)

    def share(n: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(n) % 3
        return (y[:, None] + rng.normal(scale=noise, size=(n, 4))).astype(np.float32), y

    sizes = dict(zip(NAMES, ((rows, 0.3), (rows // 2, 1.0), (rows, 2.0)), strict=True))
    tests = {"north": share(1, 0.3), "south": share(17, 1.0), "west": share(25, 2.0)}
    return fedadc.from_clients({name: share(*size) for name, size in sizes.items()}, tests=tests)


def trained(metrics: tuple[str, ...] = ("fairness",), **settings: Any) -> fedadc.Federation:
    torch.manual_seed(0)
    return fedadc.Federation(
        model=fedadc.models.MLP((4,), 3, hidden=[8]), data=hospitals(), local=fedadc.LocalWork(steps=4, batch_size=8),
        evaluate=fedadc.evaluation.Evaluation(metrics=metrics, batch_size=10), **settings,
    )  # fmt: skip


def test_every_round_has_the_figures_of_the_clients_own_rows() -> None:
    federation = trained()
    assert federation.data.test is not None
    for result in federation.rounds(3):
        right = (federation.predict(result.state, federation.data.test.x).argmax(1) == federation.data.test.y).numpy()
        own = np.array([right[np.asarray(federation.data.test_owners) == name].mean() for name in NAMES])
        expected = {"worst": own.min(), "p10": np.percentile(own, 10), "mean": own.mean(), "spread": own.std()}
        assert {name: result.metrics[f"test_accuracy_{name}"] for name in expected} == expected
        assert result.metrics["test_accuracy"] == right.mean() != own.mean()


def test_a_method_with_personal_models_has_figures_of_these() -> None:
    federation = trained(method=fedadc.methods.FedPer())
    *_, last = federation.rounds(2)
    test = federation.data.test
    assert test is not None
    owners, own = np.asarray(federation.data.test_owners), []
    for name in NAMES:
        rows = torch.from_numpy(np.flatnonzero(owners == name))
        predicted = federation.predict(last.state, test.x[rows], client=name).argmax(1)
        own.append(float((predicted == test.y[rows]).double().mean()))
    found = last.metrics["personal_accuracy_worst"], last.metrics["personal_accuracy_mean"]
    assert found == (min(own), np.mean(own)) and "test_accuracy_worst" not in last.metrics


def test_fairness_changes_no_other_figure_and_no_bit_of_training() -> None:
    plain, fair = (list(trained(metrics).rounds(3))[-1] for metrics in ((), ("fairness",)))
    assert torch.equal(plain.state.theta, fair.state.theta)
    assert {name: fair.metrics[name] for name in plain.metrics} == plain.metrics


def test_the_same_figures_on_any_number_of_workers(tmp_path: Path) -> None:
    data = hospitals()
    test = {"x_test": data.test.x, "y_test": data.test.y, "client_test": data.test_owners} if data.test else {}
    np.savez(tmp_path / "all.npz", x=data.train.x, y=data.train.y, client=data.owners, **test)
    config = {
        "rounds": 3, "data": {"name": "npz", "path": str(tmp_path / "all.npz")},
        "model": {"name": "mlp", "hidden": [8]}, "local": {"steps": 3, "batch_size": 8},
        "evaluate": {"metrics": ["fairness"], "batch_size": 7},
    }  # fmt: skip
    for workers in (0, 1, 2):
        fedadc.run(config, out=tmp_path / str(workers), workers=workers)
    alone, *others = (records(tmp_path / str(workers), seconds=False) for workers in (0, 1, 2))
    assert 0 <= alone[-1]["test_accuracy_worst"] <= alone[-1]["test_accuracy_p10"] <= 1
    assert others == [alone, alone]


def test_fairness_without_owners_is_one_sentence() -> None:
    with pytest.raises(FedadcError, match=r"fairness does not apply to LocalOnly, which judges"):
        trained(method=fedadc.methods.LocalOnly())
    settings = {
        "model": fedadc.models.MLP((5,), 4, [6]).double(),
        "evaluate": fedadc.evaluation.Evaluation(metrics=("fairness",)),
    }
    with pytest.raises(
        FedadcError, match=r"^evaluate.metrics: fairness needs held-out rows .* does not say whose they are\.$"
    ):
        fedadc.Federation(data=small_federation(), **settings)
    x, y = np.random.default_rng(0).normal(size=(40, 5)), np.arange(40) % 4
    with pytest.raises(FedadcError, match=r"fairness needs .* but no rows are held out\.$"):
        fedadc.Federation(data=fedadc.from_arrays(x, y), clients=4, test=0, **settings)
