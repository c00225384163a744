"""What tasks count: sums over cut batches add up, metrics have their definitions, impossible sums are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedadc.errors import FedadcError
from fedadc.tasks import TASKS, Classification, Regression, Target, Task, added
from fedadc.tasks.base import Sums

TARGETS = (Target("height", 170.0, 10.0), Target("mass", 70.0, 12.5))
TASK_OF = {"classification": Classification(3), "regression": Regression(TARGETS)}


def samples(task: Task, n: int = 23, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and labels that fit a task."""
    rng = np.random.default_rng(seed)
    outputs = torch.from_numpy(rng.normal(size=(n, *task.outputs)).astype(np.float32))
    if isinstance(task, Classification):
        return outputs, torch.from_numpy(rng.integers(task.classes, size=n))
    return outputs, torch.from_numpy(rng.normal([170, 70], [10, 12.5], size=(n, 2)).astype(np.float32))


def test_every_task_is_tried() -> None:
    assert TASKS.keys() == TASK_OF.keys()


@pytest.mark.parametrize("name", TASKS)
def test_sums_of_cut_batches_add_up(name: str) -> None:
    task = TASK_OF[name]
    outputs, y = samples(task)
    whole = task.counted(outputs, y)
    cut = added(task.counted(outputs[i : i + 5], y[i : i + 5]) for i in range(0, len(y), 5))
    assert {n: (a.shape, a.dtype) for n, a in whole.items()} == dict(task.shapes()), "the shapes are those promised"
    assert whole.keys() == cut.keys()
    for key in whole:
        np.testing.assert_allclose(cut[key], whole[key], rtol=1e-6)
    assert task.possible(whole, len(y)) and not task.possible(whole, len(y) + 1)


@pytest.mark.parametrize("name", TASKS)
def test_sums_that_cannot_be_are_refused(name: str) -> None:
    task = TASK_OF[name]
    sums = task.counted(*samples(task))
    for key, value in sums.items():
        wrong = [-1 - value] if key != "deviation" else []
        wrong += [np.full_like(value, np.nan), np.full_like(value, np.inf)] if value.dtype == np.float64 else []
        for array in wrong:
            assert not task.possible({**sums, key: array}, 23), (key, array)


def test_regression_is_measured_in_the_units_of_the_labels() -> None:
    """MSE, MAE and R² by their definitions in NumPy, float64, with labels far from the constants of the scale."""
    task = TASK_OF["regression"]
    outputs, y = samples(task, 41)
    y = y + 5.0
    predicted, labels = task.predicted(outputs), y.double().numpy()
    np.testing.assert_allclose(predicted, outputs.double().numpy() * [10, 12.5] + [170, 70], rtol=1e-15)
    error = predicted - labels
    r2 = 1 - (error**2).sum(axis=0) / ((labels - labels.mean(axis=0)) ** 2).sum(axis=0)
    found = task.metrics(task.counted(outputs, y), ["per_target"])
    assert found["mse"] == pytest.approx((error**2).mean(), rel=1e-12)
    assert found["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-12)
    assert found["loss"] == pytest.approx(((error / [10, 12.5]) ** 2).mean(), rel=1e-12)
    assert found["r2"] == pytest.approx(r2.mean(), rel=1e-10)
    assert found["per_target_r2"] == pytest.approx(list(r2), rel=1e-10)
    assert found["per_target_mse"] == pytest.approx(list((error**2).mean(axis=0)), rel=1e-12)
    assert found["per_target_mae"] == pytest.approx(list(np.abs(error).mean(axis=0)), rel=1e-12)


def test_r2_keeps_its_digits_far_from_the_center() -> None:
    """Labels of 1e9 ± 1 with a center of 0, and labels that do not differ, of which rounding leaves a sum."""
    rng = np.random.default_rng(0)
    y = 1e9 + rng.normal(size=(50, 1))
    outputs = torch.from_numpy(y + 0.1 * rng.normal(size=(50, 1)))
    task = Regression((Target("a", 0.0, 1.0, mean=1e9),))
    expected = 1 - ((outputs.numpy() - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    assert task.metrics(task.counted(outputs, torch.from_numpy(y)), [])["r2"] == pytest.approx(expected, rel=1e-6)
    task, same = Regression((Target("a", 9.4731, 2.0),)), torch.full((7, 1), 3.3, dtype=torch.float64)
    assert "r2" not in task.metrics(task.counted(torch.zeros(7, 1), same), [])


def test_labels_that_do_not_differ_have_no_r2() -> None:
    task = Regression((Target("a"),))
    found = task.metrics(task.counted(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [3.0]])), ["per_target"])
    targets = {"per_target_mse": [2.5], "per_target_mae": [1.5], "per_target_r2": [None]}
    assert found == {"loss": 2.5, "mse": 2.5, "mae": 1.5, **targets}


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 99))
def test_hidden_labels_keep_the_accuracy(classes: int, n: int, seed: int) -> None:
    task = Classification(classes + 1)
    sums: Sums = task.counted(*samples(task, n, seed))
    hidden = task.without_labels(sums)
    assert task.metrics(hidden, []) == task.metrics(sums, [])
    assert not hidden["confusion"][1:].any()


def test_labels_that_do_not_fit_are_named() -> None:
    classes, numbers = TASK_OF["classification"], TASK_OF["regression"]
    assert classes.label_problem(torch.tensor([0, 2, 3]), "test") == "label 3 of test sample 2 is outside 0..2"
    assert "int64" in classes.label_problem(torch.zeros(3), "train")
    assert "[n, 2]" in numbers.label_problem(torch.zeros(3), "train")
    wrong = torch.tensor([[1.0, 2.0], [1.0, torch.nan]])
    assert numbers.label_problem(wrong, "test") == "a label of test sample 1 is NaN or infinite"
    for spread in (0.0, -1.0, float("nan")):
        with pytest.raises(FedadcError, match="spread above 0"):
            Target("a", 0.0, spread)


def test_training_labels_are_scaled_in_the_type_of_the_model() -> None:
    task, y = TASK_OF["regression"], torch.tensor([[180.0, 70.0]])
    for dtype in (torch.float32, torch.float64):
        scaled = task.for_training(y, "cpu", dtype)
        assert scaled.dtype == dtype and scaled.tolist() == [[1.0, 0.0]]
