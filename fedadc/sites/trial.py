"""Try a federation on this machine: deal the data of a config to sites, start all processes, and follow the run."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedadc.config.settings import Config, FederationConfig
from fedadc.errors import FedadcError, WorkersLost, require
from fedadc.runs.layout import METRICS
from fedadc.runs.record import is_finished
from fedadc.runs.runner import Watcher
from fedadc.sites.app import APP_CONFIG, config_of_app, write_app, write_app_files
from fedadc.sites.dealing import deal
from fedadc.sites.local import LOGS, LOOK_EVERY, TLS, LocalFederation, require_free
from fedadc.sites.status import read_failure, read_status
from fedadc.system.files import folder_lock
from fedadc.system.processes import cores
from fedadc.system.user_code import Notes

log = logging.getLogger("fedadc")


def prepared(
    folder: Path, config: Config | None, sites: int | None, data_dir: Path | None = None, port: int | None = None
) -> tuple[LocalFederation, Config]:
    """A federation in a folder and its config: one that is there, or a new one with the data of the given config."""
    _require_flower()
    odd = sorted({*str(folder.resolve())} & {*'"\\'})
    require(not odd, f"{folder}: Flower cannot have {' or '.join(odd)} in the path of a folder; choose another one.")
    if port is not None:
        require_free(port)
    federation = LocalFederation(folder)
    is_app, begun = (folder / APP_CONFIG).is_file(), federation.run.exists()
    require(
        not is_app or federation.dealt is not None,
        f"{folder} has an app without data for its sites; a trial with the data of a config needs a new folder.",
    )
    if is_app and federation.dealt is not None and (begun or config is None):
        known = config_of_app(folder)
        require(config is None, f"the run in {folder} has begun; leave out --config to go on with it.")
        dealt = len(federation.dealt.sites)
        require(sites in (None, dealt), f"the data in {folder} is dealt to {dealt} sites; leave out --sites to go on.")
        return federation, known
    require(config is not None, f"{folder} has no data for sites; give --config, whose data is dealt to them.")
    assert config is not None
    data = federation.folder / "data"
    shutil.rmtree(data, ignore_errors=True)  # of a trial that did not begin
    dealt_data = deal(config, sites, data, data_dir)
    settings = config.federation or FederationConfig()
    agreed = replace(settings, sites=tuple(dealt_data.sites), evaluate=dealt_data.evaluate)
    if len(dealt_data.sites) > 2 * cores():  # Flower gives up processes that take long to start
        agreed = replace(agreed, at_once=settings.at_once or 2 * cores())
    config = replace(config, federation=agreed)
    (write_app_files if is_app else write_app)(folder, config)
    federation.keep(dealt_data)
    return federation, config_of_app(folder)


def train_on_this_machine(
    folder: Path,
    config: Config | None = None,
    *,
    sites: int | None = None,
    port: int | None = None,
    data_dir: Path | None = None,
    tls: bool = False,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> Path:
    """Deal the data of a config to sites and train with them; or go on with the federation in a folder.

    With `tls`, connections are encrypted, and sites prove who they are; certificates and keys are made for it.
    """
    federation, known = prepared(folder, config, sites, data_dir, port)
    secure(federation, tls, notes)
    return train_here(federation, known, port, watch or (lambda record: None), notes, lambda sentence: None)


def secure(federation: LocalFederation, tls: bool, notes: Notes) -> None:
    """Make certificates and keys for a federation if it wants them, and say if they expire soon."""
    require(
        tls or federation.certificates is None,
        f"{federation.app} was started with TLS; say --tls to go on, or delete {federation.folder / TLS}.",
    )
    if tls and (warning := federation.secure()) is not None:
        notes(warning)


def end_processes(folder: Path) -> int:
    """End all processes of the federation in a folder; returns how many there were."""
    federation = LocalFederation(folder)
    require(federation.folder.is_dir(), f"{folder} has no federation of this machine.")
    return federation.down()


def train_here(
    federation: LocalFederation, config: Config, port: int | None, watch: Watcher, notes: Notes, show: Notes
) -> Path:
    """Start all processes of a federation, follow its run to the end, and end them. Returns the run directory."""
    with folder_lock(federation.folder):
        return _train(federation, config, port, watch, notes, show)


def _train(
    federation: LocalFederation, config: Config, port: int | None, watch: Watcher, notes: Notes, show: Notes
) -> Path:
    if left := federation.down():
        notes(f"{left} processes of an earlier start were ended")
    known = len(federation.run_log())
    began = time.time()
    try:
        running = federation.start(port, notes)
        for record in _records(federation.run / METRICS, running):
            if record is not None:
                watch(record)
            elif (status := read_status(federation.run)) is not None and status.started > began and status.activity:
                show(status.activity.words)
    finally:
        federation.down()
    if (failure := read_failure(federation.run, began)) is not None:
        raise failure
    if not is_finished(federation.run, config):
        lines = federation.run_log()[known:].splitlines()
        if said := [line.partition("error: ")[2] for line in lines if "error: " in line]:
            raise WorkersLost(said[-1])
        raise WorkersLost(
            f"the server of {federation.app} has ended after round {_last_round(federation.run / METRICS)}; "
            f"`fedadc federation up {shlex.quote(str(federation.app))}` goes on with it ({federation.folder / LOGS})."
        )
    return federation.run


def _records(file: Path, running: subprocess.Popen[bytes]) -> Iterator[dict[str, Any] | None]:
    """The records of rounds, as they are written, until a process has ended; None now and then."""
    last, ended = _last_round(file), False
    while not ended:
        ended = running.poll() is not None
        for record in _read(file):
            if record["round"] > last:
                last = record["round"]
                yield record
        yield None
        time.sleep(LOOK_EVERY)


def _read(file: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        for line in file.read_text().splitlines():
            with suppress(ValueError):  # it is being written
                yield json.loads(line)


def _last_round(file: Path) -> int:
    return max((record["round"] for record in _read(file)), default=0)


def _require_flower() -> None:
    try:
        import flwr
    except ImportError as error:
        raise FedadcError("federations need Flower, which is not installed: pip install 'fedadc[flower]'.") from error
    version = tuple(int(part) for part in flwr.__version__.split(".")[:2] if part.isdecimal())
    require(version >= (1, 41), f"federations need Flower 1.41 or newer, not {flwr.__version__}.")
