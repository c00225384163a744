"""A report of any task: regression has figures by client, and refuses what needs classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedadc.data.batches import Inputs
from fedadc.data.dataset import Normalization, Samples
from fedadc.errors import FedadcError
from fedadc.evaluation.metrics import Evaluation, MetricCounter
from fedadc.evaluation.report import Owners, SplitReport
from fedadc.models.flat import FlatModel
from fedadc.tasks import Classification, Regression, Target

OWNERS = ["a"] * 20 + ["b"] * 1 + ["c"] * 12


def report_of(task: Any, y: torch.Tensor, outputs: int, **settings: Any) -> SplitReport:
    torch.manual_seed(0)
    model = FlatModel(nn.Linear(4, outputs).double())
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(len(y), 4)))
    inputs, evaluation = Inputs(Normalization(), torch.float64), Evaluation(batch_size=5)
    counter = MetricCounter(model, {"test": Samples(x, y)}, inputs, task, evaluation)
    return SplitReport("test", counter, model.theta, settings.pop("classes", ()), lambda: Owners.of(OWNERS), **settings)


def test_regression_by_client() -> None:
    y = torch.from_numpy(np.random.default_rng(1).normal(loc=70, scale=9, size=(33, 1)))
    report = report_of(Regression((Target("pulse", 70.0, 9.0),)), y, 1)
    predicted = report.counter.task.predicted(report.outputs[0])
    for name, rows in zip(report.owners.names, report.owners.rows, strict=True):
        errors = (predicted - y.numpy())[rows]
        assert report.per_client[name]["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-10)
        assert report.per_client[name]["mse"] == pytest.approx((errors**2).mean(), rel=1e-10)
    worst = max(row["mae"] for row in report.per_client.values())
    assert report.fairness["mae"]["worst"] == worst and "r2" not in report.fairness  # client b has one row
    low, high = report.intervals(by_client=True)["mae"]
    assert low < high
    for needs_classes in (lambda: report.confusion, lambda: report.per_class):
        with pytest.raises(FedadcError, match=r"needs classes, which regression does not have\.$"):
            needs_classes()
    with pytest.raises(FedadcError, match=r"^auroc needs classes, which regression does not have"):
        report_of(report.counter.task, y, 1, figures=("auroc",))
    with pytest.raises(FedadcError, match="top5 is no metric of regression; it has per_target, fairness"):
        replace(report.counter, evaluation=Evaluation(metrics=("top5",)))


def test_regression_by_target() -> None:
    """Two targets of very different units have figures of their own, beside their mean."""
    rng = np.random.default_rng(2)
    y = torch.from_numpy(np.stack([rng.normal(70, 9, 33), rng.normal(1e4, 2e3, 33)], axis=1))
    report = report_of(Regression((Target("pulse", 70.0, 9.0), Target("cost", 1e4, 2e3))), y, 2)
    errors = report.counter.task.predicted(report.outputs[0]) - y.numpy()
    for column, name in enumerate(("pulse", "cost")):
        own, labels = errors[:, column], y[:, column].numpy()
        expected = {
            "mse": (own**2).mean(),
            "rmse": np.sqrt((own**2).mean()),
            "mae": np.abs(own).mean(),
            "r2": 1 - (own**2).sum() / ((labels - labels.mean()) ** 2).sum(),
        }
        assert report.per_target[name] == pytest.approx(expected, rel=1e-10)
    counter = replace(report.counter, evaluation=Evaluation(metrics=("per_target",), batch_size=5))
    found = counter(report.theta)["test"]
    for name in ("mse", "mae", "r2"):
        each = [row[name] for row in report.per_target.values()]
        assert found[f"per_target_{name}"] == pytest.approx(each, rel=1e-12)
        assert found[name] == pytest.approx(np.mean(each), rel=1e-12)
    classes = report_of(Classification(3), torch.arange(33) % 3, 3, classes=("x", "y", "z"))
    with pytest.raises(FedadcError, match="a figure by target needs task: regression, not classification"):
        classes.per_target  # noqa: B018


def test_classification_agrees_with_itself() -> None:
    """Rows of all clients together, in batches of any size, have the metrics of the whole."""
    y = torch.arange(33) % 3
    report = report_of(Classification(3), y, 3, classes=("x", "y", "z"), figures=("auroc", "brier"))
    whole = report.counter(report.theta)["test"]
    numbers = report.numbers(report.all_rows)
    assert numbers["accuracy"] == whole["accuracy"] and numbers["loss"] == pytest.approx(whole["loss"], rel=1e-13)
    assert report.confusion.sum() == 33 and np.trace(report.confusion) / 33 == whole["accuracy"]
    assert [row["support"] for row in report.per_class.values()] == [11, 11, 11]
    mean = np.mean([row["auroc"] for row in report.per_class.values()])
    assert report.extra()["auroc"] == numbers["auroc"] == pytest.approx(mean)
    one = report_of(Classification(3), y, 3, classes=("x", "y", "z"), figures=("auroc",), positive="y")
    assert one.extra()["auroc"] == report.per_class["y"]["auroc"]
