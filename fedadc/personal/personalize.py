"""`fedadc personalize`: every client of a finished run gets a model of its own, measured on its own test share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedadc.errors import require
from fedadc.personal.folder import PersonalFolder, check_place
from fedadc.personal.plots import plot_gains
from fedadc.personal.request import Request
from fedadc.personal.results import ResultRow, as_csv
from fedadc.personal.run import Watcher, file_of, personal_run
from fedadc.runs.layout import PERSONAL_PLOT, PERSONAL_SUMMARY, PERSONAL_TABLE
from fedadc.runs.record import RecordedRun, read_run
from fedadc.system.determinism import deterministic, resolve_device

log = logging.getLogger("fedadc")


@dataclass(frozen=True)
class PersonalizationResult:
    """What `personalize` gives: a row per run and regularizer (and moment, where data has changed)."""

    rows: list[ResultRow] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)


def personalize(
    runs: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    watch: Watcher | None = None,
    **asked: Any,
) -> PersonalizationResult:
    """Give every client of a run (or of several) its own model; leave RUN/personal, or `out`.

    Further arguments are those of `Request`: clients, regularizers, layers, model, data, epochs, lr, mu, lam.
    `watch` is called after every client.
    """
    unknown = sorted(asked.keys() - Request.__dataclass_fields__.keys())
    require(not unknown, f"personalize has no argument {', '.join(unknown)}.")
    if asked.get("data") is not None:
        asked["data"] = Path(asked["data"])
    if isinstance(asked.get("regularizers"), str):
        asked["regularizers"] = [asked["regularizers"]]
    request = Request(**asked)
    paths = [Path(p) for p in ([runs] if isinstance(runs, str | Path) else runs)]
    require(bool(paths), "there is no run to personalize.")
    require(len({p.resolve() for p in paths}) == len(paths), "a run stands there twice.")
    require(out is None or len(paths) == 1, "--out is for one run; several leave a folder in each.")
    recorded = [read_run(path) for path in paths]
    for run in recorded:
        done, planned = run.records[-1]["round"], run.tree.get("rounds", 0)
        if done < planned and not run.stopped():
            log.warning("%s stands at round %d of %d", run.path, done, planned)
    configs = [run.config() for run in recorded]
    for config in configs:
        request.calibration(config)
    files = [file_of(run, config, request.model) for run, config in zip(recorded, configs, strict=True)]
    places = [request.place(path) if out is None else Path(out) for path in paths]
    for place in places:
        check_place(place, overwrite)
    result = PersonalizationResult()
    for run, config, file, label, place in zip(recorded, configs, files, _labels(recorded), places, strict=True):
        subject = personal_run(run, config, file, label, request, data_dir, resolve_device(device))
        with PersonalFolder.written(place, subject.round) as folder, deterministic():
            rows = subject.measured(folder, watch)
            folder.keep_texts({PERSONAL_TABLE: as_csv(rows), PERSONAL_SUMMARY: subject.summary(rows)})
            plot_gains(rows, folder.part / PERSONAL_PLOT)
        result.rows.extend(rows)
        result.folders.append(place)
    return result


def _labels(runs: Sequence[RecordedRun]) -> list[str]:
    """How the table calls runs: by their labels, where these tell them apart."""
    labels = [str(run.tree.get("label") or run.path.resolve().name) for run in runs]
    return [label if labels.count(label) == 1 else str(run.path) for label, run in zip(labels, runs, strict=True)]
