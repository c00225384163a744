"""The paper's CNN on the real CIFAR-10 (opt-in: `make test-data`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedadc.runs.runner import run

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "cifar10-sort.yaml"


@pytest.mark.realdata
def test_the_experiment_runs_and_learns() -> None:
    """Even shares instead of two labels, so that a few rounds of a narrow network are enough to leave chance."""
    changes = ["rounds=6", "model.width=0.25", "data.partition=iid", "cohort.ratio=0.1", "evaluate.every=6"]
    history = run(EXPERIMENT, changes).history
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert history[-1]["test_accuracy"] > 0.2
