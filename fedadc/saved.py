"""A saved model, evaluated on its run's own test data or on other data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedadc.data.own import read_more
from fedadc.errors import require
from fedadc.evaluate import Metrics, measure
from fedadc.exact import resolve_device
from fedadc.plan import prepare
from fedadc.record import MODEL, read_run


def evaluate_run(
    path: Path, other: Path | None, metrics: Sequence[str], data_dir: Path | None, device: str
) -> dict[str, Metrics]:
    """Metrics of the final model per split, or on `other`."""
    config = read_run(path).config(without=("method", "objective"))  # a user's own may be gone; a model needs neither
    require((path / MODEL).is_file(), f"{path} has no {MODEL}: the run has not finished.")
    evaluation = replace(config.evaluate, metrics=tuple(dict.fromkeys([*config.evaluate.metrics, *metrics])))
    model = replace(config.model, weights=str((path / MODEL).resolve()))
    data = config.data
    if other is not None and data.name == "csv":  # a table is read with the columns of the training table
        data = replace(data, test=str(other.resolve()))
    require(other is None or other.exists(), f"--data: there is no {other}.")
    plan = prepare(replace(config, evaluate=evaluation, model=model, data=data), data_dir, resolve_device(device))
    evaluator, known = plan.federation.evaluator, plan.federation.data
    splits = evaluator.splits
    if other is not None:
        samples = splits["test"] if data.name == "csv" else read_more(other, known)
        require(
            samples.x.shape[1:] == known.train.x.shape[1:] and samples.x.dtype == known.train.x.dtype,
            f"{other} holds {list(samples.x.shape[1:])} {samples.x.dtype}, but the model was trained on "
            f"{list(known.train.x.shape[1:])} {known.train.x.dtype}.",
        )
        splits = {other.name: samples}
    theta = plan.federation.start().theta
    return {
        name: measure(evaluator.model, theta, samples, evaluator.inputs, evaluator.classes, evaluation)
        for name, samples in splits.items()
    }
