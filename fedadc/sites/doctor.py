"""What is wrong with a federation before a run: at the SuperLink, and at every site.

The SuperLink is reached as Flower's commands reach it: its address and certificate are in Flower's own config.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import ssl
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedadc.errors import FedadcError, WorkersLost, one_line, require
from fedadc.sites.app import config_of_app
from fedadc.sites.certificates import WARN_DAYS
from fedadc.sites.examination import Examination

REACHED_WITHIN = 10.0  # seconds
ENDS_AFTER = 60.0  # seconds that Flower may take beside the examination


@dataclass(frozen=True)
class Link:
    """How a SuperLink is reached."""

    name: str
    address: str
    insecure: bool
    authority: Path | None = None  # certificate that it is checked against; None: those that the system trusts

    @staticmethod
    def of(name: str | None) -> Link:
        """A SuperLink in Flower's config, by its name there; None: the default one."""
        home = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser()
        path = home / "config.toml"
        require(path.is_file(), f"there is no {path}, in which Flower's commands look for the address of a SuperLink.")
        try:
            known: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"]
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError) as error:
            raise FedadcError(f"{path} has no SuperLink ({one_line(error)}).") from error
        name = name or str(known.get("default", ""))
        found = known.get(name)
        others = ", ".join(key for key, value in known.items() if isinstance(value, dict))
        usable = isinstance(found, dict) and isinstance(found.get("address"), str)
        require(usable, f"{path} has no SuperLink {name!r} with an address; it has {others or 'none'}.")
        assert isinstance(found, dict)
        root = found.get("root-certificates")
        authority = None if root is None else (home / str(root)).expanduser()
        return Link(name, found["address"], bool(found.get("insecure")), authority)

    def problem(self) -> str | None:
        """Why it cannot be reached, or what is wrong with its certificate; None: nothing."""
        host, _, port = self.address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), REACHED_WITHIN) as plain:
                return None if self.insecure else self._problem_of_certificate(plain, host.strip("[]"))
        except ssl.SSLCertVerificationError as error:
            return f"the certificate of {self.address} is not valid: {error.verify_message}"
        except ssl.SSLError as error:
            return f"{self.address} does not speak TLS as expected ({error.reason})"
        except (OSError, ValueError) as error:
            return f"{self.address} cannot be reached ({one_line(error)})"

    def _problem_of_certificate(self, plain: socket.socket, host: str) -> str | None:
        context = ssl.create_default_context(cafile=None if self.authority is None else str(self.authority))
        with context.wrap_socket(plain, server_hostname=host) as secured:
            found: Any = secured.getpeercert()
        ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(found["notAfter"]), UTC)
        days = (ends - datetime.now(UTC)).days
        return f"the certificate of {self.address} expires in {days} days" if days < WARN_DAYS else None


def examine_federation(app: Path, link: str | None, within: float, site_keys: Path | None = None) -> Examination:
    """Examine the SuperLink, and every site that connects within so many seconds."""
    config_of_app(app)  # refuses what could not train
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise FedadcError("federations need Flower, which is not installed: pip install 'fedadc[flower]'.") from error
    found = Link.of(link)
    problem = found.problem()
    require(problem is None or "expires in" in problem, f"{problem}.", WorkersLost)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        said = _run(app, found, report, within, site_keys)
        require(
            report.is_file(),
            f"the examination did not end; Flower says: {said}. It must be called on the SuperLink's machine.",
            WorkersLost,
        )
        examination = Examination.read(report)
    if problem is not None:
        examination.problems.append(problem)
    return examination


def _run(app: Path, link: Link, report: Path, within: float, site_keys: Path | None) -> str:
    """Run the app, which only examines; returns the last thing that Flower says."""
    given = {"examine": str(report), "examine-within": within}
    if site_keys is not None:
        given["site-keys"] = str(site_keys.resolve())
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in given.items())
    words = [
        str(Path(sys.executable).parent / "flwr"),
        "run",
        str(app),
        link.name,
        "--stream",
        "--run-config",
        settings,
    ]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * within + ENDS_AFTER,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"nothing, for {2 * within + ENDS_AFTER:g} seconds ({shlex.join(words[:4])})"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"
