"""`fedadc compare` as a value: a table of runs, and a plot of their curves."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedadc.analysis.compare import Summary, summarize, table_rows
from fedadc.analysis.plots import plot
from fedadc.runs.layout import METRICS
from fedadc.runs.record import RecordedRun, find_runs, read_run
from fedadc.system.user_code import Notes
from fedadc.tasks import SCORES

log = logging.getLogger("fedadc")


@dataclass(frozen=True)
class Comparison:
    """Runs side by side: a row for each setting, over its seeds."""

    rows: list[Summary]
    runs: list[RecordedRun]
    metric: str
    x: str = "round"
    title: str | None = None

    def plot(self, file: str | Path) -> Path:
        """Save the convergence curves as a PNG."""
        plot(self.runs, Path(file), self.metric, self.title, self.x)
        return Path(file)

    def __iter__(self) -> Iterator[Summary]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        """The table as text: as many lines as there are rows, and one for the headings."""
        headings, cells = table_rows(self.rows)
        widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
        lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in [headings, *cells])
        return "\n".join(line.rstrip() for line in lines)


def compare(
    runs: str | Path | Sequence[str | Path],
    *,
    target: float | None = None,
    metric: str | None = None,
    x: str = "round",
    notes: Notes = log.info,
) -> Comparison:
    """Compare run directories, or folders of them: mean ± std over seeds, progress until a target, bytes sent.

    `target` is the value to reach (default: 90 % of the best), `x` the measure of progress: round, bytes, bytes_up,
    bytes_down, virtual_seconds, seconds or samples. Without `metric` it is test_accuracy, or test_r2 where runs predict
    numbers. No user code is loaded.
    """
    paths = [Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    found = find_runs(paths)
    begun = [path for path in found if path in paths or (path / METRICS).stat().st_size]
    for path in found if begun else ():
        if path not in begun:
            notes(f"{path} is left out: it has no finished round yet")
    read = [read_run(path) for path in begun or found]
    for run in read:
        done, planned = run.records[-1]["round"], run.tree.get("rounds", 0)
        if done < planned and not run.stopped():
            notes(f"{run.path} ended after {done} of {planned} rounds")
    chosen = default_metric(read) if metric is None else metric
    return Comparison(summarize(read, target, chosen, x), read, chosen, x)


def default_metric(runs: Sequence[RecordedRun]) -> str:
    """The score of the task on test data: the first that any round of a run has."""
    names = [f"test_{score}" for score in SCORES]
    return next((name for name in names for run in runs if any(name in record for record in run.records)), names[0])
