"""A whole federation on this machine, for trying: a SuperLink, a SuperNode per site, and a run.

Flower's processes start others, some of which outlive them. All of them have the folder of the federation in their
environment, by which they are found when they must end.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedadc.errors import FedadcError, WorkersLost, require
from fedadc.sites.app import LOCAL_FOLDER
from fedadc.sites.certificates import SITES_FOLDER, Certificates
from fedadc.sites.dealing import DealtData
from fedadc.sites.node import ALLOWED, KEEP
from fedadc.system.files import write_file

MARK = "FEDADC_FEDERATION"  # the environment variable of all processes of a federation: its folder
DEALT, RUN, LOGS, HOME, TLS = "dealt.json", "run", "logs", "flower", "tls"
START = 60.0  # seconds for the SuperLink to listen
END = 10.0  # seconds for processes to end when they are asked to
LOOK_EVERY = 0.2
LOOK_OF_MANY = 2.0
MANY_SITES, KEEP_OF_MANY = 10, 10  # processes that stay have 250 MB each; of more sites, they end after seconds


@dataclass(frozen=True)
class LocalFederation:
    """What belongs to a federation on this machine is in one folder below its app."""

    app: Path

    @property
    def folder(self) -> Path:
        return self.app.resolve() / LOCAL_FOLDER

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.folder / RUN

    @property
    def dealt(self) -> DealtData | None:
        """The data of the sites, if it was dealt before."""
        file = self.folder / DEALT
        if not file.is_file():
            return None
        found: Mapping[str, Any] = json.loads(file.read_text())
        return DealtData({n: Path(p) for n, p in found["sites"].items()}, found["server"] and Path(found["server"]))

    @property
    def looks_every(self) -> float:
        """Seconds between two looks of a site's process for work. Many sites that look often leave no time for it."""
        dealt = self.dealt
        return LOOK_EVERY if dealt is None or len(dealt.sites) <= MANY_SITES else LOOK_OF_MANY

    def keep(self, dealt: DealtData) -> None:
        sites = {name: str(path) for name, path in dealt.sites.items()}
        text = json.dumps({"sites": sites, "server": None if dealt.server is None else str(dealt.server)}, indent=1)
        write_file(self.folder / DEALT, text.encode())

    @property
    def certificates(self) -> Certificates | None:
        """The certificates and keys of this federation; None: it works without TLS."""
        found = Certificates(self.folder / TLS)
        return found if found.authority.is_file() else None

    def secure(self) -> str | None:
        """Make what TLS and the authentication of sites need, if it is not there; returns a warning about it."""
        dealt = self.dealt
        assert dealt is not None
        certificates = Certificates(self.folder / TLS)
        certificates.create(["localhost", "127.0.0.1"], list(dealt.sites))
        return certificates.warning()

    def processes(self) -> list[int]:
        """All processes of this federation, also those that Flower has started."""
        mark = f"{MARK}={self.folder}"
        return [pid for pid, variables in environments() if mark in variables and pid != os.getpid()]

    def down(self) -> int:
        """End all processes; returns how many there were."""
        count = len(self.processes())
        for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
            until = time.monotonic() + END
            while (found := self.processes()) and time.monotonic() < until:
                for pid in found:
                    with suppress(OSError):  # it has ended
                        os.kill(pid, number)
                time.sleep(LOOK_EVERY)
        left = self.processes()
        require(not left, f"processes {left} of {self.folder} do not end.", WorkersLost)
        return count

    def start(self, port: int | None, notes: Callable[[str], None]) -> subprocess.Popen[bytes]:
        """Start everything; returns the process of `flwr run`, which ends with the run."""
        dealt = self.dealt
        assert dealt is not None
        address = f"127.0.0.1:{free_port() if port is None else port}"
        self.start_link(address)
        notes(f"the SuperLink is at {address}{'' if self.certificates is None else ', with TLS'}")
        self.register_sites(address)
        for name in dealt.sites:
            self.start_site(name, address)
        notes(f"{len(dealt.sites)} SuperNodes were started: {', '.join(list(dealt.sites)[:20])}")
        return self.start_run(address)

    def start_link(self, address: str, database: str | None = None) -> subprocess.Popen[bytes]:
        """Start the SuperLink, and wait until it listens. Its database is a file, so that it may be killed."""
        host, _, port = address.rpartition(":")
        require_free(int(port), host)
        secured = ["--insecure"] if self.certificates is None else self.certificates.link_options
        words = [*secured, "--disable-runtime-dependency-installation", "--host", host, "--port", port]
        link = self.start_program(
            "superlink", "flower-superlink", [*words, "--database", database or str(self.folder / "state.db")]
        )
        until = time.monotonic() + START
        while not _listens(host, int(port)):
            gone = link.poll() is not None
            require(
                not gone and time.monotonic() < until,
                f"the SuperLink did not start; see {self.folder / LOGS / 'superlink.log'}.",
                WorkersLost,
            )
            time.sleep(LOOK_EVERY)
        return link

    def start_site(
        self, name: str, address: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the SuperNode of a site, with further variables in its environment."""
        return self.start_program(f"site-{name}", "flower-supernode", self.site_options(name, address), variables)

    def site_options(self, name: str, address: str) -> list[str]:
        """The options of the SuperNode of a site."""
        dealt = self.dealt
        assert dealt is not None
        given = {
            "client": name, "data-path": str(dealt.sites[name]), "folder": str(self.folder / "sites" / name),
            "allow": " ".join(ALLOWED), "keep": KEEP if len(dealt.sites) <= MANY_SITES else KEEP_OF_MANY,
        }  # fmt: skip
        settings = " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())
        secured = ["--insecure"] if self.certificates is None else self.certificates.site_options(name)
        return [*secured, "--superlink", address, "--port", str(free_port()), "--node-config", settings]

    def start_run(self, address: str) -> subprocess.Popen[bytes]:
        """Start the run, or go on with it; the process ends with the run."""
        dealt = self.dealt
        assert dealt is not None
        self.write_connection(address)
        keys = "" if self.certificates is None else str(self.certificates.folder / SITES_FOLDER)
        given = {"out": str(self.run), "server-data": str(dealt.server or ""), "site-keys": keys}
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in given.items())
        return self.start_program("run", "flwr", ["run", str(self.app), "local", "--stream", "--run-config", settings])

    def write_connection(self, address: str) -> None:
        """Tell Flower's commands where the SuperLink is."""
        (self.folder / HOME).mkdir(parents=True, exist_ok=True)
        trusted = "insecure = true"
        if self.certificates is not None:
            trusted = f"insecure = false\nroot-certificates = {json.dumps(str(self.certificates.authority))}"
        connection = f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "{address}"\n{trusted}\n'
        write_file(self.folder / HOME / "config.toml", connection.encode())

    def register_sites(self, address: str) -> None:
        """Register the keys of all sites at the SuperLink; those that it knows stay."""
        dealt, certificates = self.dealt, self.certificates
        if certificates is None or dealt is None:
            return
        self.write_connection(address)
        starting = [
            self.start_program(
                "register", "flwr", ["supernode", "register", str(certificates.public_key(name)), "local"]
            )
            for name in dealt.sites
        ]
        for process in starting:
            process.wait(START)

    def start_program(
        self, name: str, program: str, words: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program of Flower, which belongs to this federation; `name` is that of its log."""
        environment = {**os.environ, MARK: str(self.folder), "FLWR_HOME": str(self.folder / HOME), **(variables or {})}
        environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": f"{self.looks_every:g}"}
        programs = str(Path(sys.executable).parent)  # Flower looks for its own ones by name
        environment["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
        (self.folder / LOGS).mkdir(parents=True, exist_ok=True)
        with (self.folder / LOGS / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(Path(programs) / program), *words],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def run_log(self) -> str:
        """What the runs of this federation have said so far."""
        path = self.folder / LOGS / "run.log"
        return path.read_text(errors="replace") if path.is_file() else ""


def require_free(port: int, host: str = "127.0.0.1") -> None:
    """Refuse a port on which another program listens, or on which this user may not listen."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise FedadcError(f"port {port} {reason}; choose another one with --port.") from None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), LOOK_EVERY).close()
    except OSError:
        return False
    return True


def environments() -> list[tuple[int, Sequence[str]]]:
    """The environments of this user's processes."""
    if not Path("/proc/self/environ").exists():  # macOS
        done = subprocess.run(["ps", "-Eww", "-x", "-o", "pid=,command="], capture_output=True, text=True, check=False)
        return [(int(line.split()[0]), line.split(" ")) for line in done.stdout.splitlines() if line.split()]
    found: list[tuple[int, Sequence[str]]] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                found.append((int(process.name), (process / "environ").read_text(errors="replace").split("\0")))
    return found
