"""How a federation stands: what its server waits for, and what it knows of every site. It is in a small file beside
the run directory, which others may read while the server works.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from fedadc.errors import DataError, DiskError, Diverged, FedadcError, WorkersLost
from fedadc.system.files import write_file

JOIN = "join"
DOING = {
    JOIN: "waiting for sites",
    "describe": "sites describe their data",
    "check": "sites check their data and the model",
    "agree": "sites prepare their data",
    "train": "sites train",
    "count": "sites evaluate",
    "finish": "sites get the final model",
}
SHORT = {
    JOIN: "sites", "describe": "described", "check": "checked", "agree": "prepared", "train": "trained",
    "count": "evaluated", "finish": "finished",
}  # fmt: skip
WRITE_EVERY = 1.0  # seconds between two writings of what has changed
ALIVE_EVERY = 10.0  # seconds between two writings of what has not
Value = TypeVar("Value")


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


@dataclass
class SiteStatus:
    """What the server knows of a site."""

    counted: int = 0  # the last round in which its upload was counted; 0: none
    answered: float = 0.0  # when it answered last, in seconds since 1970; 0: never
    bytes_up: int = 0  # of messages, without Flower's framing
    bytes_down: int = 0
    late: int = 0  # answers that came too late, or did not come in time
    refused: int = 0  # answers or nodes that were refused
    problems: int = 0  # requests that it could not do, as it says
    lost: int = 0  # messages that were lost
    last_problem: str = ""  # of any of these kinds


@dataclass
class Status:
    """How a federation stands."""

    rounds: int = 0  # of the run
    run: str = ""
    round: int = 0  # the last one that is complete
    seconds: float = 0.0  # that it took
    metrics: dict[str, float] = field(default_factory=dict)  # of the last round that has them
    activity: Activity | None = None
    sites: dict[str, SiteStatus] = field(default_factory=dict)
    audited: str = ""  # checksum of the last line of the audit file
    finished: bool = False
    error: str = ""  # with which the server has ended
    exit_code: int = 0
    started: float = field(default_factory=time.time)
    updated: float = 0.0
    process: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)

    @property
    def connected(self) -> tuple[str, ...]:
        return () if self.activity is None else self.activity.connected

    @property
    def state(self) -> str:
        """finished, failed, running or stopped."""
        if self.finished or self.error:
            return "finished" if self.finished else "failed"
        return "running" if self._is_alive() else "stopped"

    def _is_alive(self) -> bool:
        if self.host != socket.gethostname():
            return time.time() - self.updated < 6 * ALIVE_EVERY
        try:
            os.kill(self.process, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:  # it belongs to another user
            return True
        return _started_at(self.process) < self.started + 60.0  # else another process has the number now


def _started_at(process: int) -> float:
    """When a process of this machine was started, in seconds since 1970; 0: it is not known."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
        (booted,) = [line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")]
        return int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def status_file(out: Path) -> Path:
    return out.with_name(f"{out.name}-status.json")


class StatusFile:
    """Writes the status when it has changed, and now and then when it has not, which shows that the server lives."""

    def __init__(self, path: Path) -> None:
        self.path, self._written, self._at = path, "", 0.0

    def __call__(self, status: Status) -> None:
        now, ended = time.time(), status.finished or bool(status.error)
        found = asdict(status)
        del found["updated"]
        text = json.dumps(found)
        wait = 0.0 if ended else WRITE_EVERY if text != self._written else ALIVE_EVERY
        if now - self._at < wait:
            return
        self._written, self._at, status.updated = text, now, now
        with suppress(OSError):  # training is worth more than its status
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, json.dumps(asdict(status)).encode())


def read_status(out: Path) -> Status | None:
    """How the federation with this run directory stands; None: nothing is known."""
    from pydantic import TypeAdapter  # takes long to import

    try:
        found: Status = TypeAdapter(Status).validate_json(status_file(out).read_bytes())
        known = found.activity is None or found.activity.kind in DOING
        return found if known else replace(found, activity=None)
    except (OSError, ValueError, RecursionError):  # it may be of another version, or damaged
        return None


def read_failure(out: Path, since: float = 0.0) -> FedadcError | None:
    """Why the server of a run, which was started after a time, has ended; None: it has not failed."""
    kinds = {kind.exit_code: kind for kind in (WorkersLost, DataError, DiskError, Diverged, FedadcError)}
    status = read_status(out)
    if status is None or not status.error or status.started < since:
        return None
    return kinds.get(status.exit_code, FedadcError)(status.error)
