"""What the server of a federation is doing: in its log, and in a small file beside its run directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from fedadc.errors import DataError, DiskError, Diverged, FedadcError, WorkersLost
from fedadc.system.files import write_file
from fedadc.system.user_code import Notes

JOIN = "join"
DOING = {
    JOIN: "waiting for sites",
    "describe": "sites describe their data",
    "agree": "sites prepare their data",
    "train": "sites train",
    "count": "sites evaluate",
    "finish": "sites get the final model",
}
SHORT = {
    JOIN: "sites", "describe": "described", "agree": "prepared", "train": "trained", "count": "evaluated",
    "finish": "finished",
}  # fmt: skip
EVERY_ROUND = ("train", "count")  # which are told only if they take long
REMIND_EVERY = 60.0  # seconds
TOLD = ("test_accuracy", "site_test_accuracy", "personal_accuracy", "train_loss")  # figures of a round


@dataclass(frozen=True)
class Activity:
    """What the server waits for, and from whom."""

    kind: str  # of the requests, or JOIN
    wanted: int  # sites
    answered: int
    missing: tuple[str, ...]  # names of sites that have not answered, as far as they are known
    connected: tuple[str, ...]

    @property
    def sentence(self) -> str:
        missing = f", not yet {', '.join(self.missing[:3])}" if 0 < len(self.missing) <= 3 else ""
        return f"{DOING[self.kind]}: {self.answered} of {self.wanted}{missing}"

    @property
    def words(self) -> str:
        """The same, short enough for a line with a progress bar."""
        last = f", not yet {self.missing[0]:.12}" if len(self.missing) == 1 < self.wanted else ""
        return f"{SHORT[self.kind]} {self.answered}/{self.wanted}{last}"


def status_file(out: Path) -> Path:
    return out.with_name(f"{out.name}-status.json")


class Reporter:
    """Writes what the server waits for to a file whenever it changes, and tells it and every round in sentences."""

    def __init__(self, path: Path, rounds: int, notes: Notes, watch: Callable[[dict[str, Any]], None]) -> None:
        self.path, self.rounds, self.notes, self.watch = path, rounds, notes, watch
        self._written, self._kind, self._told = b"", "", time.monotonic()

    def activity(self, activity: Activity) -> None:
        text = json.dumps(asdict(activity)).encode()
        if text != self._written:
            self._write(text)
        begins = activity.kind != self._kind and activity.kind not in EVERY_ROUND
        if begins or time.monotonic() - self._told > REMIND_EVERY:
            self._tell(activity.sentence)
        self._kind = activity.kind

    def round(self, record: dict[str, Any]) -> None:
        found = [f"{name} {record[name]:.4g}" for name in TOLD if name in record]
        left = timedelta(seconds=round(record["seconds"] * (self.rounds - record["round"])))
        found.append(f"{record['seconds']:.1f} s, about {left} left")
        self._tell(f"round {record['round']} of {self.rounds}: {', '.join(found)}")
        self.watch(record)

    def failed(self, error: FedadcError) -> None:
        with suppress(OSError):  # the error is told anyhow
            self._write(json.dumps({"error": str(error), "exit_code": error.exit_code}).encode())

    def _write(self, text: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.path, text)
        self._written = text

    def _tell(self, sentence: str) -> None:
        self.notes(sentence)
        self._told = time.monotonic()


def read_failure(out: Path) -> FedadcError | None:
    """Why the server of a run has ended; None: it has not failed."""
    kinds = {kind.exit_code: kind for kind in (WorkersLost, DataError, DiskError, Diverged, FedadcError)}
    try:
        found: Mapping[str, Any] = json.loads(status_file(out).read_bytes())
        return kinds[found["exit_code"]](str(found["error"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_status(out: Path) -> Activity | None:
    """What the server of a run did last; None: nothing is known."""
    try:
        found: Mapping[str, Any] = json.loads(status_file(out).read_bytes())
        names = {key: tuple(map(str, found[key])) for key in ("missing", "connected")}
        kind = str(found["kind"])
        return Activity(kind, int(found["wanted"]), int(found["answered"]), **names) if kind in DOING else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
