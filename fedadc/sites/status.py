"""What the server of a federation is doing, in a small file beside its run directory that others may read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedadc.system.files import write_file

JOIN = "join"
DOING = {
    JOIN: "waiting for sites",
    "describe": "sites describe their data",
    "agree": "sites prepare their data",
    "train": "sites train",
    "count": "sites evaluate",
    "finish": "sites get the final model",
}


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


def status_file(out: Path) -> Path:
    return out.with_name(f"{out.name}-status.json")


class StatusWriter:
    """Writes the activity to a file whenever it changes."""

    def __init__(self, path: Path) -> None:
        self.path, self.last = path, b""

    def __call__(self, activity: Activity) -> None:
        text = json.dumps(asdict(activity)).encode()
        if text != self.last:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, text)
            self.last = text


def read_status(out: Path) -> Activity | None:
    """What the server of a run did last; None: nothing is known."""
    try:
        found: Mapping[str, Any] = json.loads(status_file(out).read_bytes())
        names = {key: tuple(map(str, found[key])) for key in ("missing", "connected")}
        kind = str(found["kind"])
        return Activity(kind, int(found["wanted"]), int(found["answered"]), **names) if kind in DOING else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
