"""What `fedadc federation status` shows: how a federation stands, and whether its audit file is as it was written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedadc.errors import FedadcError
from fedadc.sites.journal import audit_file, changed_line
from fedadc.sites.local import LocalFederation
from fedadc.sites.status import Status, read_status


@dataclass(frozen=True)
class Overview:
    """A federation, as the files beside its run directory tell it."""

    run: Path  # directory
    status: Status
    audit: Path | None  # None: there is none
    changed: int | None  # the first line of it that is not as it was written; None: all are

    def as_json(self) -> dict[str, Any]:
        audit = {"file": None if self.audit is None else str(self.audit), "changed_line": self.changed}
        return {"directory": str(self.run), "state": self.status.state, **asdict(self.status), "audit": audit}


def federation_status(folder: Path) -> Overview:
    """How a federation stands, given its run directory or the folder of a trial."""
    for out in (folder.resolve(), LocalFederation(folder).run):
        if (status := read_status(out)) is not None:
            audit = audit_file(out)
            known = audit.is_file()
            return Overview(
                out, status, audit if known else None, changed_line(audit, status.audited) if known else None
            )
    raise FedadcError(f"{folder} is not the run directory of a federation, nor the folder of a trial that has begun.")
