"""The progress of many runs, and the time that remains, which is learned from the runs so far."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunProgress:
    """A run that is being trained."""

    label: str
    round: int
    rounds: int
    record: dict[str, Any]  # of its last round; {} before the first


@dataclass(frozen=True)
class Progress:
    """All runs of a study."""

    runs: int  # to train, without those that were finished before
    ended: int  # finished, diverged, failed, or not run
    running: Sequence[RunProgress]
    last: tuple[str, dict[str, Any]] | None  # label and last record of the run that ended last
    seconds_left: float | None = None  # None: nothing is known yet
    unit: str = "runs"

    @property
    def share(self) -> float:
        """How much of the work is done, in runs."""
        return self.ended + sum(run.round / run.rounds for run in self.running)


@dataclass
class _Work:
    units: float = 0.0  # of work done
    seconds: float = 0.0  # that it took


class PaceLearner:
    """Learns the time that a unit of work takes from what was done, separately for each kind of run.

    A kind of which nothing was done yet is expected at the pace of all others together. Where units are estimated
    seconds, a pace is the factor by which the estimate is wrong.
    """

    def __init__(self) -> None:
        self._work: dict[str, _Work] = {}
        self._all = _Work()

    def add(self, kind: str, units: float, seconds: float) -> None:
        if units:  # a process that is still loading says nothing about the pace
            for work in (self._work.setdefault(kind, _Work()), self._all):
                work.units += units
                work.seconds += seconds

    def copy(self) -> PaceLearner:
        return deepcopy(self)

    def pace(self, kind: str) -> float | None:
        """Seconds per unit; None if nothing was done yet."""
        known = self._work.get(kind, self._all)
        return known.seconds / known.units if known.units else None

    def seconds(self, kind: str, units: float) -> float | None:
        pace = self.pace(kind)
        return None if pace is None else pace * units


def remaining(seconds: Sequence[float], slots: int) -> float:
    """The time until all runs have ended, `slots` at once: none ends before its own time."""
    return max(sum(seconds) / slots, max(seconds)) if seconds else 0.0
