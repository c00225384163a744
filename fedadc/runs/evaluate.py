"""Evaluate the saved models of a run, on the data of the run or on other data."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedadc.config.build import Plan, prepare
from fedadc.config.ending import BEST
from fedadc.data.dataset import Array, Dataset, Samples
from fedadc.data.loaders.samples import read_owned_samples
from fedadc.data.remarks import count_repeated
from fedadc.errors import DataError, require, unknown
from fedadc.evaluation.fairness import FAIRNESS, owner_of_rows
from fedadc.evaluation.figures import CLASS_FIGURES
from fedadc.evaluation.metrics import Evaluation, MetricCounter
from fedadc.evaluation.report import Owners, SplitReport
from fedadc.federation import Federation
from fedadc.models.build import read_weights
from fedadc.runs.evaluation import BY, EvaluationResult
from fedadc.runs.layout import other_models
from fedadc.runs.own_models import has_only_own_models, reports_of_own_models
from fedadc.runs.record import TRAINING_ONLY, RecordedRun, model_origin, read_run, require_same_split, saved_model
from fedadc.system.determinism import resolve_device
from fedadc.system.user_code import Notes
from fedadc.tasks import EXTRA_METRICS
from fedadc.training.client_states import Storage
from fedadc.training.state import Metrics

log = logging.getLogger("fedadc")


def evaluate(
    run: str | Path,
    data: str | Path | Any | None = None,
    *,
    metrics: str | Sequence[str] = (),
    by: str | None = None,
    positive: str | None = None,
    intervals: bool = False,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    trust: bool = False,
    notes: Notes = log.info,
) -> EvaluationResult:
    """Metrics of the saved models of a run per split; only on the samples of `data` if given.

    `data` is a file or folder; of a table's run also a DataFrame, or columns by name. `metrics` are further ones:
    top5, macro_f1, per_class, fairness; auroc, average_precision, sensitivity, specificity, calibration_error, brier.
    The names of splits begin with the name of the model, except for the model by which the
    run is judged. The result has its figures by client and by class, and the confusion matrix; `by` ("client" or
    "class") says what its `to_frame()` has, and whether `intervals` are drawn over clients or rows. `positive` is the
    class of sensitivity, specificity, AUROC and average precision; by default the last of two classes. Where a
    method has clients' own models only, splits are named "personal test" etc.: each model on its client's rows. User
    code is loaded if it is as the run has sealed it, or with `trust`.
    """
    metrics = [metrics] if isinstance(metrics, str) else metrics
    path, other = Path(run), Path(data) if isinstance(data, str | os.PathLike) else data
    for name in metrics:
        if name not in (known := (*EXTRA_METRICS, FAIRNESS, *CLASS_FIGURES)):
            raise unknown("metric", name, known)
    require(by is None or by in BY, f"by must be client, class or target, not {by!r:.60}.")
    require(not isinstance(other, Path) or other.exists(), f"data: there is no {other}.", DataError)
    recorded, figures = read_run(path), tuple(dict.fromkeys(name for name in metrics if name in CLASS_FIGURES))
    if has_only_own_models(recorded, trust, notes):
        text = f"{path} has clients' own models only, each judged on its client's held-out rows; leave out `data`."
        require(other is None, text)
        of_clients = reports_of_own_models(
            recorded, lambda counted: _counting(counted, metrics), figures, positive, data_dir, device, trust, notes
        )
        own: dict[str, Metrics] = {f"personal {name}": {**r.numbers(r.all_rows)} for name, r in of_clients.items()}
        return _result(own, {f"personal {name}": report for name, report in of_clients.items()}, by, intervals)
    plan, files = _opened(recorded, metrics, data_dir, device, trust, notes)
    federation = plan.federation
    if other is None:
        require_same_split(path, plan.config, federation.data)
        rows = _held_out(federation, path, notes)
    else:
        rows = _rows_of(federation, other, FAIRNESS in metrics, notes)
    result = _result(*_of_files(plan, files, rows, positive, figures), by, intervals)
    result.repeated = _repeated(result, files)
    return result


def _of_files(
    plan: Plan, files: Mapping[str, Path], rows: _Rows, positive: str | None, figures: tuple[str, ...]
) -> tuple[dict[str, Metrics], dict[str, SplitReport]]:
    """The metrics and the details of every model on every split."""
    federation = plan.federation
    found: dict[str, Metrics] = {}
    reports: dict[str, SplitReport] = {}
    for prefix, file in files.items():
        federation.load_state_dict(read_weights(file), str(file))
        theta, classes = federation.start().theta.clone(), federation.data.classes
        for split, values in rows.counter(theta).items():
            found_by, seed = rows.owners[split], plan.config.seed
            report = SplitReport(split, rows.counter, theta, classes, found_by, positive, figures, seed)
            found[prefix + split], reports[prefix + split] = {**values, **report.extra()}, report
    return found, reports


def _result(
    metrics: Mapping[str, Metrics], reports: Mapping[str, SplitReport], by: str | None, intervals: bool
) -> EvaluationResult:
    result = EvaluationResult(metrics, reports, by)
    if intervals:
        result.compute_intervals()
    return result


def _counting(evaluation: Evaluation, metrics: Sequence[str]) -> Evaluation:
    """What a run has counted, and further metrics."""
    counted = [name for name in (*evaluation.metrics, *metrics) if name not in CLASS_FIGURES]
    return replace(evaluation, metrics=tuple(dict.fromkeys(counted)))


def _opened(
    recorded: RecordedRun, metrics: Sequence[str], data_dir: str | Path | None, device: str, trust: bool, notes: Notes
) -> tuple[Plan, dict[str, Path]]:
    """The federation of a run, which counts these metrics too, and the files of its models by the prefix of names."""
    config, path = recorded.config(TRAINING_ONLY, trust, notes), recorded.path
    files = {"": saved_model(recorded), **{f"{name} ": file for name, file in other_models(path).items()}}
    evaluation, model = _counting(config.evaluate, metrics), replace(config.model, weights=None)
    plan = prepare(
        replace(config, evaluate=evaluation, model=model, storage=Storage()), data_dir, resolve_device(device)
    )
    return plan, files


def _repeated(splits: Iterable[str], files: Mapping[str, Path]) -> tuple[str, ...]:
    """The splits of the best model, if it is the one after the last round."""
    best = files.get(f"{BEST} ")
    same = best is not None and 0 < model_origin(best)[1] == model_origin(files[""])[1]
    return tuple(name for name in splits if same and name.startswith(f"{BEST} "))


@dataclass(frozen=True)
class _Rows:
    """The rows to evaluate on, and how to find out whose they are."""

    counter: MetricCounter
    owners: Mapping[str, Callable[[], Owners]]


def _held_out(federation: Federation, run: Path, notes: Notes) -> _Rows:
    """The rows that the run has held out."""
    splits = federation.counter.splits
    require(bool(splits), f"{run} has held out no rows to evaluate on; give other samples as `data`.")
    return _Rows(federation.counter, {split: partial(_owners_here, federation, split, notes) for split in splits})


def _rows_of(federation: Federation, data: Path | Any, fairness: bool, notes: Notes) -> _Rows:
    """The rows of a file, folder or DataFrame; `fairness`: whose they are must be known."""
    name = data.name if isinstance(data, Path) else "data"
    samples, ids = _samples(data, federation.data)
    _note_seen_rows(federation.data.train, samples, name, notes)
    owners = partial(_owners_there, str(data) if isinstance(data, Path) else name, ids, federation)
    by_row = {name: owner_of_rows(owners().shares, len(samples))} if fairness or ids is not None else {}
    return _Rows(replace(federation.counter, splits={name: samples}, owners=by_row), {name: owners})


def _owners_here(federation: Federation, split: str, notes: Notes) -> Owners:
    """Which client has which held-out rows of the run."""
    if not federation.names_owners(split):
        notes(f"the {split} rows name no clients; each client has a share of them in proportion to its training labels")
    return federation.owners_of(split)


def _owners_there(file: str, ids: Array | None, federation: Federation) -> Owners:
    """Which client has which rows of a file."""
    encoding = federation.data.encoding
    column = None if encoding is None else encoding.client
    hint = f"it has no column {column}" if column else "the training data names none either"
    require(ids is not None, f"by client: {file} does not say whose its rows are; {hint}.", DataError)
    return Owners.of([] if ids is None else ids, federation.client_names)


def _note_seen_rows(train: Samples, new: Samples, name: str, notes: Notes) -> None:
    seen = count_repeated(train, new)
    if seen:
        notes(f"{seen:,} of {len(new):,} rows of {name} are among the rows that the model was trained on")


def _samples(file: Path | Any, data: Dataset) -> tuple[Samples, Array | None]:
    """Samples of a file, folder or DataFrame that fit the model, and the client of each, if the file says it."""
    (samples, owners), like = read_owned_samples(file, data), data.train.x
    require(
        samples.x.shape[1:] == like.shape[1:] and samples.x.dtype == like.dtype,
        f"{file if isinstance(file, Path) else 'data'} has inputs {list(samples.x.shape[1:])} of type "
        f"{samples.x.dtype}, but the model was trained on {list(like.shape[1:])} of type {like.dtype}.",
        DataError,
    )
    return samples, owners
