"""The trace of a federation: who joined, was absent, or did not count, in every round. A simulation can repeat it.

A trace is a file of JSON lines, one per round, with the names of clients:
{"round": 3, "joined": ["zug"], "absent": ["bern"], "dropped": ["lugano"], "skipped": []}
The clients of the first line are numbered from 0, and those that join later go on from there. After the last line,
nobody joins, everybody is present, and every upload counts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import DataError, kind_of_failure, one_line, require, require_file
from fedadc.training.members import Members

MAX_TRACE_BYTES = 2**28


@dataclass(frozen=True)
class TraceLine:
    """What happened in one round, by the names of clients."""

    round: int
    joined: tuple[str, ...] = ()  # before this round, in the order of their numbers
    absent: tuple[str, ...] = ()  # could not be chosen
    dropped: tuple[str, ...] = ()  # were chosen, but their uploads came too late, were refused, or never came
    skipped: tuple[str, ...] = ()  # sent updates that are not finite

    def text(self) -> str:
        named = {field.name: list(getattr(self, field.name)) for field in fields(self) if field.name != "round"}
        return json.dumps({"round": self.round, **named}, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Trace:
    """The lines of a trace, from round 1 on without gaps."""

    lines: tuple[TraceLine, ...]

    @staticmethod
    def read(path: Path) -> Trace:
        require_file(path, "faults.trace")
        size = path.stat().st_size
        require(size <= MAX_TRACE_BYTES, f"faults.trace: {path} is larger than {MAX_TRACE_BYTES} bytes.", DataError)
        try:
            texts = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise kind_of_failure(error)(f"faults.trace: {path} cannot be read ({one_line(error)}).") from error
        lines = [_parsed(text, f"faults.trace: {path}, line {number}") for number, text in enumerate(texts, start=1)]
        require(bool(lines), f"faults.trace: {path} is empty; it must have a line for every round.", DataError)
        return Trace.of(lines, f"faults.trace: {path}")

    @staticmethod
    def of(lines: Iterable[TraceLine], source: str) -> Trace:
        """A trace of these lines, which are checked to be possible."""
        trace, known = Trace(tuple(lines)), set[str]()
        for number, line in enumerate(trace.lines, start=1):
            where = f"{source}, line {number}"
            require(line.round == number, f"{where} is of round {line.round}, but it must be of {number}.", DataError)
            again = known & {*line.joined} or len({*line.joined}) < len(line.joined)
            require(not again, f"{where}: a client joins for the second time.", DataError)
            known |= {*line.joined}
            strangers = sorted({*line.absent, *line.dropped, *line.skipped} - known)
            require(not strangers, f"{where}: client {', '.join(strangers)[:60]} has not joined.", DataError)
            require({*line.absent} < known, f"{where}: all clients are absent.", DataError)
        return trace

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All clients, in the order of their numbers."""
        return tuple(name for line in self.lines for name in line.joined)

    @property
    def first(self) -> tuple[str, ...]:
        """The clients of the first round, whose data settled how all data is encoded."""
        return self.lines[0].joined


class TracedMembers(Members):
    """The clients of every round, as a trace tells it."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(len(trace.names))
        self.fixed = trace.first == trace.names and not any(line.absent for line in trace.lines)
        self._lines = trace.lines
        self._number = {name: number for number, name in enumerate(trace.names)}
        self._counts = np.cumsum([len(line.joined) for line in trace.lines])

    def _line(self, round: int) -> TraceLine:
        return self._lines[round - 1] if round <= len(self._lines) else TraceLine(round)

    def _numbers(self, names: Sequence[str]) -> list[int]:
        return [self._number[name] for name in names]

    def count(self, round: int) -> int:
        return int(self._counts[min(round, len(self._lines)) - 1])

    def present(self, round: int) -> Array:
        everyone = super().present(round)
        return everyone[~np.isin(everyone, self._numbers(self._line(round).absent))]

    def dropped(self, round: int) -> Collection[int]:
        return self._numbers(self._line(round).dropped)

    def skipped(self, round: int) -> Collection[int]:
        return self._numbers(self._line(round).skipped)


def _parsed(text: str, where: str) -> TraceLine:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{where} is not JSON.") from None
    names = [field.name for field in fields(TraceLine)]
    valid = (
        isinstance(found, dict)
        and {"round"} <= found.keys() <= {*names}
        and type(found["round"]) is int
        and all(isinstance(found.get(name, []), list) for name in names[1:])
        and all(isinstance(client, str) for name in names[1:] for client in found.get(name, []))
    )
    require(valid, f"{where} must have a round and lists of names: {', '.join(names[1:])}.", DataError)
    return TraceLine(found["round"], *(tuple(found.get(name, ())) for name in names[1:]))
