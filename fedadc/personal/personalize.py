"""`fedadc personalize`: tune a model for every client of a run, and evaluate it on the client's own test share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedadc.errors import require
from fedadc.fields.summary import field_summary
from fedadc.personal.calibrate import Layers
from fedadc.personal.folder import PersonalFolder, check_target
from fedadc.personal.plots import plot_gains
from fedadc.personal.request import Request
from fedadc.personal.results import ResultRow, as_csv
from fedadc.personal.run import Watcher, personal_run, start_file
from fedadc.runs.layout import PERSONAL_PLOT, PERSONAL_SUMMARY, PERSONAL_TABLE
from fedadc.runs.record import RecordedRun, read_run
from fedadc.system.determinism import deterministic, resolve_device
from fedadc.system.user_code import Notes

log = logging.getLogger("fedadc")


@dataclass(frozen=True)
class PersonalizationResult:
    """What `personalize` returns: a row per run and regularizer (and per phase if the clients' data has changed)."""

    rows: list[ResultRow] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)

    __repr__ = field_summary


def personalize(
    runs: str | Path | Sequence[str | Path],
    *,
    clients: str | Sequence[int] | None = None,
    regularizers: str | Sequence[str] = "none",
    layers: Layers = "head",
    model: str | None = None,
    data: str | Path | None = None,
    epochs: int = 2,
    lr: float | None = None,
    mu: float | None = None,
    lam: float | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    trust: bool = False,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> PersonalizationResult:
    """Tune a model for every client of one run or several, and write the results to RUN/personal, or to `out`.

    `clients` are numbers or a text such as "0-9,12" (default: all), `regularizers` any of none, prox (weight `mu`) and
    confidence (weight `lam`), `layers` head or all, `model` the NAME of model-NAME.safetensors to start from, `data`
    the clients' new data, `lr` by default that of the run. User code is loaded if it is as the run has sealed it, or
    with `trust`. `watch` is called after every client, `notes` with messages about the user code.
    """
    is_path = data is None or isinstance(data, str | Path)
    require(is_path, f"data must be the path of an .npz, .csv or YAML file, not {type(data).__name__}.")
    names = (regularizers,) if isinstance(regularizers, str) else tuple(regularizers)
    given = {"lr": lr, "mu": mu, "lam": lam, "data": None if data is None else Path(data), "model": model}
    request = Request(clients=clients, regularizers=names, layers=layers, epochs=epochs, **given)  # type: ignore[arg-type]
    return _personalized(request, runs, out, overwrite, data_dir, device, trust, watch, notes)


def _personalized(
    request: Request,
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None,
    overwrite: bool,
    data_dir: str | Path | None,
    device: str,
    trust: bool,
    watch: Watcher | None,
    notes: Notes,
) -> PersonalizationResult:
    paths = [Path(p) for p in ([runs] if isinstance(runs, str | Path) else runs)]
    require(bool(paths), "no runs to personalize; give at least one run directory.")
    require(len({p.resolve() for p in paths}) == len(paths), "the same run is given twice.")
    require(
        out is None or len(paths) == 1,
        "`out` is for one run; with several runs, each gets its own folder RUN/personal.",
    )
    recorded = [read_run(path) for path in paths]
    for run in recorded:
        done, planned = run.records[-1]["round"], run.tree.get("rounds", 0)
        if done < planned and not run.stopped():
            log.warning("%s is not finished: round %d of %d", run.path, done, planned)
    configs = [run.config(trust=trust, notes=notes) for run in recorded]
    tasks = {config.task_name for config in configs}
    require(
        len(tasks) == 1, f"the runs have different tasks ({', '.join(sorted(tasks))}); personalize them one by one."
    )
    for config in configs:
        request.calibration(config)  # checks the request before anything is written
    files = [start_file(run, config, request.model) for run, config in zip(recorded, configs, strict=True)]
    targets = [request.folder(path) if out is None else Path(out) for path in paths]
    for target in targets:
        check_target(target, overwrite)
    result = PersonalizationResult()
    for run, config, file, label, target in zip(recorded, configs, files, _labels(recorded), targets, strict=True):
        personal = personal_run(run, config, file, label, request, data_dir, resolve_device(device))
        with PersonalFolder.create(target, personal.round) as folder, deterministic():
            rows = personal.personalize_clients(folder, watch)
            add_results(folder, rows, personal.summary(rows))
        result.rows.extend(rows)
        result.folders.append(target)
    return result


def add_results(folder: PersonalFolder, rows: Sequence[ResultRow], summary: str) -> None:
    """Add the table, the summary and the plot of a personalization to its folder."""
    folder.add_texts({PERSONAL_TABLE: as_csv(rows), PERSONAL_SUMMARY: summary})
    plot_gains(rows, folder.partial / PERSONAL_PLOT)


def _labels(runs: Sequence[RecordedRun]) -> list[str]:
    """The names of the runs in the table: their labels, or their paths where labels are equal."""
    labels = [str(run.tree.get("label") or run.path.resolve().name) for run in runs]
    return [label if labels.count(label) == 1 else str(run.path) for label, run in zip(labels, runs, strict=True)]
