"""What happens in a federation, as lines of JSON with the time, the run, the round and the site.

RUN-log.jsonl has all of it. RUN-audit.jsonl has who joined, who was refused, and every round; it is only ever appended
to, and every line has the checksum of the line before, so that a line that was changed or removed is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedadc.engines.pooled import EventLog
from fedadc.errors import DiskError, FedadcError
from fedadc.sites.status import Activity, SiteStatus, Status
from fedadc.tasks import SCORES

Event = Literal[
    "began", "joined", "returned", "refused", "late", "problem", "absent", "lost", "waiting", "round", "failed",
    "finished",
]  # fmt: skip
NOT_AUDITED = {"absent", "lost", "waiting"}
COUNTED = {"late": "late", "refused": "refused", "problem": "problems", "lost": "lost"}  # event -> figure of its site
SHOWN = (  # figures of a round
    *(part + score for part in ("test_", "site_test_", "personal_") for score in SCORES),
    "train_loss",
)
Line = Mapping[str, Any]


class Journal:
    """Is told what happens, and passes it on: lines to files, the status to whoever watches."""

    def __init__(
        self,
        rounds: int = 0,
        lines: Sequence[Callable[[Line], None]] = (),
        watchers: Sequence[Callable[[Status], None]] = (),
        before: Status | None = None,  # how things stood when an earlier server of the run ended
        audited: Callable[[], str] = lambda: "",  # checksum of the last line of the audit file
    ) -> None:
        self.status = Status(rounds)
        if before is not None:
            self.status.sites = before.sites
        self.events = EventLog()  # for the record of the round
        self.round = 0  # which is under way
        self._lines, self._watchers, self._audited = lines, watchers, audited

    def site(self, name: str) -> SiteStatus:
        return self.status.sites.setdefault(name, SiteStatus())

    def happened(self, event: Event, text: str, site: str = "") -> None:
        """Something that a user should know: it is also in the record of the round."""
        self.events.record(text)
        if site and event in COUNTED:
            own = self.site(site)
            setattr(own, COUNTED[event], getattr(own, COUNTED[event]) + 1)
            own.last_problem = text
        self.write(event, {"text": text}, site)

    def write(self, event: Event, facts: Line, site: str = "") -> None:
        """Write a line, for the files alone."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        own = {"site": site} if site else {}
        line = {"time": time, "run": self.status.run, "round": self.round, **own, "event": event, **facts}
        for write in self._lines:
            write(line)
        self.status.audited = self._audited()
        self._show()

    def sent(self, site: str, size: int) -> None:
        self.site(site).bytes_down += size

    def received(self, site: str, size: int) -> None:
        own = self.site(site)
        own.bytes_up += size
        own.answered = datetime.now(UTC).timestamp()

    def activity(self, activity: Activity) -> None:
        self.status.activity = activity
        self._show()

    def round_ended(self, record: Mapping[str, Any], names: Sequence[str]) -> None:
        """A round was recorded; `names` are those of the clients."""
        status, self.round = self.status, record["round"]
        status.round, status.seconds = record["round"], record["seconds"]
        status.metrics |= {key: record[key] for key in SHOWN if record.get(key) is not None}
        left_out = {key: [names[client] for client in record.get(key, ())] for key in ("dropped", "skipped")}
        cohort, absent = [names[client] for client in record["cohort"]], {n for own in left_out.values() for n in own}
        counted = [name for name in cohort if name not in absent]
        for name in counted:
            self.site(name).counted = record["round"]
        figures = {key: record[key] for key in (*SHOWN, "wire_bytes_up", "wire_bytes_down", "seconds") if key in record}
        self.write("round", {"counted": counted, **{key: own for key, own in left_out.items() if own}, **figures})

    def failed(self, error: FedadcError) -> None:
        self.status.error, self.status.exit_code = str(error), error.exit_code
        self._show()
        with suppress(DiskError):  # it may be what has failed
            self.write("failed", {"text": str(error)})

    def finished(self) -> None:
        self.status.finished = True
        self.write("finished", {})

    def _show(self) -> None:
        for show in self._watchers:
            show(self.status)


def log_file(out: Path) -> Path:
    return out.with_name(f"{out.name}-log.jsonl")


def audit_file(out: Path) -> Path:
    return out.with_name(f"{out.name}-audit.jsonl")


class LogFile:
    """Everything, a line each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, line: Line) -> None:
        append(self.path, json.dumps(line, ensure_ascii=False).encode())


class AuditFile:
    """Joins, refusals and rounds; a line has the checksum of the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = checksum_of(last_line(path))

    @property
    def end(self) -> str:
        """The checksum of the last line."""
        return self._before

    def __call__(self, line: Line) -> None:
        if line["event"] not in NOT_AUDITED:
            text = json.dumps({**line, "before": self._before}, ensure_ascii=False).encode()
            append(self.path, text)
            self._before = checksum_of(text)


def append(path: Path, text: bytes) -> None:
    """Add a line to a file, which is on the disk afterwards. An incomplete line before it stays as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, (b"" if _is_complete(path) else b"\n") + text + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise DiskError(f"{path} cannot be written ({error.strerror}).") from error


def _is_complete(path: Path) -> bool:
    """Whether a file ends with a whole line; the last one may be cut off if its writer was killed."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")


def last_line(path: Path) -> bytes:
    if not path.is_file():
        return b""
    lines = path.read_bytes().splitlines()
    return lines[-1] if lines else b""


def checksum_of(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest() if line else ""


def changed_line(path: Path, end: str = "") -> int | None:
    """The number of the first line of an audit file that was changed, or before which one is missing; None: there is
    none. `end` is the checksum of a line that must be there, as the status has it.

    A line that was cut off when its writer was killed is none either.
    """
    lines = path.read_bytes().splitlines()
    for number, (before, text) in enumerate(zip([b"", *lines], lines, strict=False), start=1):
        try:
            known = json.loads(text)["before"]
        except (ValueError, KeyError, TypeError):
            continue  # cut off; the next line has its checksum
        if known != checksum_of(before):
            return number
    return None if not end or end in map(checksum_of, lines) else max(1, len(lines))
