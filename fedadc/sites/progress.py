"""The progress of a federation in sentences, for the log of its server."""

from __future__ import annotations

import time
from datetime import timedelta

from fedadc.sites.journal import SHOWN, Line
from fedadc.sites.status import Status
from fedadc.system.user_code import Notes

EVERY_ROUND = ("train", "count")  # which are told only if they take long
REMIND_EVERY = 60.0  # seconds


class ProgressNotes:
    """Tells every round, what begins, and now and then for whom the server waits."""

    def __init__(self, rounds: int, notes: Notes) -> None:
        self.rounds, self.notes = rounds, notes
        self._kind, self._told = "", time.monotonic()

    def line(self, line: Line) -> None:
        if line["event"] != "round":
            return
        found = [f"{name} {line[name]:.4g}" for name in SHOWN if line.get(name) is not None]
        left = timedelta(seconds=round(line["seconds"] * (self.rounds - line["round"])))
        found.append(f"{line['seconds']:.1f} s, about {left} left")
        self._tell(f"round {line['round']} of {self.rounds}: {', '.join(found)}")

    def watch(self, status: Status) -> None:
        activity = status.activity
        if activity is None:
            return
        begins = activity.kind != self._kind and activity.kind not in EVERY_ROUND
        if begins or time.monotonic() - self._told > REMIND_EVERY:
            self._tell(activity.sentence)
        self._kind = activity.kind

    def _tell(self, sentence: str) -> None:
        self.notes(sentence)
        self._told = time.monotonic()
