"""Settings are chosen by validation data: what a config measures there, and the metric of the test data beside it."""

from __future__ import annotations

from fedadc.config.settings import Config
from fedadc.errors import FedadcError
from fedadc.evaluation.stopping import validation_metrics
from fedadc.tasks import TASKS


def require_measured(config: Config, choose_by: str, what: str = "this config") -> None:
    """Refuse a metric that a run of this config does not record."""
    metrics = validation_metrics(config.method, config.evaluate, TASKS[config.task or "classification"])
    if choose_by not in metrics:
        raise FedadcError(
            f"choose_by: {choose_by} is not measured by {what}; it measures {', '.join(metrics)} (see "
            "evaluate.metrics)."
        )


def test_metric(choose_by: str) -> str:
    """The same metric on test data; for personal models, on the clients' own test shares."""
    name = choose_by.removeprefix("validation_")
    return name if name.startswith("personal_") else f"test_{name}"
