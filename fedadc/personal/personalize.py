"""`fedadc personalize`: tune a model for every client of a run, and evaluate it on the client's own test share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedadc.errors import require
from fedadc.fields.summary import field_summary
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
    out: str | Path | None = None,
    overwrite: bool = False,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    trust: bool = False,
    watch: Watcher | None = None,
    notes: Notes = log.info,
    **settings: Any,
) -> PersonalizationResult:
    """Tune a model for every client of one run or several, and write the results to RUN/personal, or to `out`.

    `settings` are the fields of `Request`: clients, regularizers, layers, model, data, epochs, lr, mu, lam.
    User code is loaded if it is as the run has sealed it, or with `trust`. `watch` is called after every client,
    `notes` with messages about the user code.
    """
    request = _request(settings)
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
            folder.add_texts({PERSONAL_TABLE: as_csv(rows), PERSONAL_SUMMARY: personal.summary(rows)})
            plot_gains(rows, folder.partial / PERSONAL_PLOT)
        result.rows.extend(rows)
        result.folders.append(target)
    return result


def _request(settings: dict[str, Any]) -> Request:
    unknown = sorted(settings.keys() - Request.__dataclass_fields__.keys())
    require(not unknown, f"personalize has no argument {', '.join(unknown)}.")
    if isinstance(settings.get("regularizers"), str):
        settings["regularizers"] = [settings["regularizers"]]
    return Request(**settings)


def _labels(runs: Sequence[RecordedRun]) -> list[str]:
    """The names of the runs in the table: their labels, or their paths where labels are equal."""
    labels = [str(run.tree.get("label") or run.path.resolve().name) for run in runs]
    return [label if labels.count(label) == 1 else str(run.path) for label, run in zip(labels, runs, strict=True)]
