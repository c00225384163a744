"""A saved model, evaluated on its run's own test data or on other data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedadc.config.build import prepare
from fedadc.data.loaders.samples import read_samples
from fedadc.errors import require
from fedadc.evaluation.evaluator import JUDGED_BY
from fedadc.models.build import read_weights
from fedadc.runs.layout import METRICS, model_file
from fedadc.runs.record import read_run, saved_model
from fedadc.system.determinism import resolve_device
from fedadc.training.client_states import Storage
from fedadc.training.state import Metrics


def evaluate_run(
    path: Path, other: Path | None, metrics: Sequence[str], data_dir: Path | None, device: str
) -> dict[str, Metrics]:
    """Metrics per split, or on `other`, of the model by which the run is judged, and of its other ones by name."""
    recorded = read_run(path)
    config = recorded.config(without=("method", "objective"))  # a user's own may be gone; a model needs neither
    by = next((name for record in recorded.records for name in JUDGED_BY if name in record), "")
    require(
        "personal" not in by,
        f"{path} has no global model to evaluate: each client has a head of its own; see {by} in {METRICS}.",
    )
    judged = saved_model(recorded)
    evaluation = replace(config.evaluate, metrics=tuple(dict.fromkeys([*config.evaluate.metrics, *metrics])))
    data = config.data
    if other is not None and data.name == "csv":  # a table is read with the columns of the training table
        data = replace(data, test=str(other.resolve()))
    require(other is None or other.exists(), f"--data: there is no {other}.")
    model = replace(config.model, weights=None)
    config = replace(config, evaluate=evaluation, model=model, data=data, storage=Storage())
    plan = prepare(config, data_dir, resolve_device(device))
    federation, known = plan.federation, plan.federation.data
    splits = federation.counter.splits
    if other is not None:
        samples = splits["test"] if data.name == "csv" else read_samples(other, known)
        require(
            samples.x.shape[1:] == known.train.x.shape[1:] and samples.x.dtype == known.train.x.dtype,
            f"{other} holds {list(samples.x.shape[1:])} {samples.x.dtype}, but the model was trained on "
            f"{list(known.train.x.shape[1:])} {known.train.x.dtype}.",
        )
        splits = {other.name: samples}
    beside = {f"{f.stem.removeprefix('model-')} ": f for f in sorted(path.glob(model_file("*")))}
    found: dict[str, Metrics] = {}
    for prefix, file in {"": judged, **beside}.items():
        federation.load_state_dict(read_weights(file), str(file))
        examiner = replace(federation.counter, splits=splits)
        found |= {prefix + name: metrics for name, metrics in examiner(federation.start().theta).items()}
    return found
