"""Evaluate the saved models of a run, on the data of the run or on other data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedadc.config.build import prepare
from fedadc.data.dataset import Dataset, Samples
from fedadc.data.loaders.samples import read_samples
from fedadc.errors import DataError, require, unknown
from fedadc.models.build import read_weights
from fedadc.runs.layout import METRICS, other_models
from fedadc.runs.record import TRAINING_ONLY, read_run, require_same_split, saved_model
from fedadc.system.determinism import resolve_device
from fedadc.system.user_code import Notes
from fedadc.tasks import EXTRA_METRICS, JUDGED_BY
from fedadc.training.client_states import Storage
from fedadc.training.state import Metrics

log = logging.getLogger("fedadc")


def evaluate(
    run: str | Path,
    data: str | Path | None = None,
    *,
    metrics: str | Sequence[str] = (),
    data_dir: str | Path | None = None,
    device: str = "cpu",
    trust: bool = False,
    notes: Notes = log.info,
) -> dict[str, Metrics]:
    """Metrics of the saved models of a run per split; only on the samples in the file or folder `data` if given.

    `metrics` are further ones: top5, macro_f1, per_class. The names of splits begin with the name of the model, except
    for the model by which the run is judged. User code is loaded if it is as the run has sealed it, or with `trust`.
    """
    metrics = [metrics] if isinstance(metrics, str) else metrics
    path, other = Path(run), None if data is None else Path(data)
    for name in metrics:
        if name not in EXTRA_METRICS:
            raise unknown("metric", name, EXTRA_METRICS)
    recorded = read_run(path)
    config = recorded.config(TRAINING_ONLY, trust, notes)
    metric = next((name for record in recorded.records for name in JUDGED_BY if name in record), "")
    require(
        "personal" not in metric,
        f"{path} has no global model to evaluate, because each client has its own head; see {metric} in {METRICS}.",
    )
    main_file = saved_model(recorded)
    evaluation = replace(config.evaluate, metrics=tuple(dict.fromkeys([*config.evaluate.metrics, *metrics])))
    require(other is None or other.exists(), f"data: there is no {other}.", DataError)
    model = replace(config.model, weights=None)
    config = replace(config, evaluate=evaluation, model=model, storage=Storage())
    plan = prepare(config, data_dir, resolve_device(device))
    federation, splits = plan.federation, plan.federation.counter.splits
    if other is None:
        require_same_split(path, plan.config, federation.data)
    else:
        splits = {other.name: _samples(other, federation.data)}
    other_files = {f"{name} ": file for name, file in other_models(path).items()}
    found: dict[str, Metrics] = {}
    for prefix, file in {"": main_file, **other_files}.items():
        federation.load_state_dict(read_weights(file), str(file))
        counter = replace(federation.counter, splits=splits)
        found |= {prefix + name: values for name, values in counter(federation.start().theta).items()}
    return found


def _samples(file: Path, data: Dataset) -> Samples:
    """Samples of a file or folder that fit the model."""
    samples, like = read_samples(file, data), data.train.x
    require(
        samples.x.shape[1:] == like.shape[1:] and samples.x.dtype == like.dtype,
        f"{file} has inputs {list(samples.x.shape[1:])} of type {samples.x.dtype}, but the model was trained on "
        f"{list(like.shape[1:])} of type {like.dtype}.",
        DataError,
    )
    return samples
