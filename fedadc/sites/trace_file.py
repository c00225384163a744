"""The trace that a federation leaves in its run directory; `faults.trace` repeats it in a simulation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedadc.runs.layout import METRICS, TRACE
from fedadc.system.files import write_file
from fedadc.training.trace import TraceLine


class TraceFile:
    """Follows metrics.jsonl, which is what counts: where a run was interrupted, the trace is written anew."""

    def __init__(self, run: Path, names: Callable[[], Sequence[str]], first: int) -> None:
        self.run, self.names, self.first = run, names, first
        self._next = 0  # round of the next line; 0: it is not known what the file has

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the line of a round that has just been recorded."""
        if record["round"] != self._next:
            self.write()
        else:
            with (self.run / TRACE).open("a", encoding="utf-8") as file:
                file.write(self._line(record).text())
        self._next = record["round"] + 1

    def write(self) -> None:
        """Write the lines of all rounds that are recorded."""
        lines = [self._line(record) for record in records_in(self.run / METRICS)]
        write_file(self.run / TRACE, "".join(line.text() for line in lines).encode())

    def _line(self, record: Mapping[str, Any]) -> TraceLine:
        names = self.names()

        def named(key: str) -> tuple[str, ...]:
            numbers: Iterable[int] = record.get(key, ())
            return tuple(names[number] for number in numbers)

        joined = tuple(names[: self.first]) if record["round"] == 1 else named("joined")
        return TraceLine(record["round"], joined, *(named(key) for key in ("absent", "dropped", "skipped")))


def records_in(metrics: Path) -> Iterator[dict[str, Any]]:
    """The records of all rounds in a file; none without a file."""
    for line in (metrics.read_text(encoding="utf-8") if metrics.is_file() else "").splitlines(keepends=True):
        if line.endswith("\n"):  # the last one may be incomplete
            yield json.loads(line)
