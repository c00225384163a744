"""Real federations on this machine, with a SuperLink and SuperNodes of Flower, whose parts can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from family import descendants, eventually
from fedadc.config.build import prepare
from fedadc.config.settings import Config
from fedadc.runs.record import load_config
from fedadc.runs.runner import run
from fedadc.sites.local import LocalFederation, free_port
from fedadc.sites.serving import recorded_terms
from fedadc.sites.site import STATES
from fedadc.sites.site_states import SiteStates
from fedadc.sites.trial import prepared, train_on_this_machine
from fedadc.training.state import Round

CONFIG: dict[str, Any] = {
    "rounds": 2, "seed": 3, "data": {"name": "digits", "clients": 2, "partition": {"name": "dirichlet", "alpha": 1.0}},
    "model": {"name": "mlp", "hidden": [12], "projection": 6}, "local": {"epochs": 1, "batch_size": 32, "lr": 0.1},
    "checkpoint": {"every": 1}, "federation": {"patience": 300},
}  # fmt: skip


def simulated(config: Config, out: Path) -> Round:
    """The last round of the simulation, whose run directory is `out`."""
    run(config, out=out)
    return list(prepare(config).federation.rounds(config.rounds))[-1]


def trained(config: Config, folder: Path) -> Path:
    """The run directory of a real federation."""
    return train_on_this_machine(folder, config, sites=config.data.clients)


def require_same_bits(here: Round, simulation: Path, folder: Path, sites: Path | None = None) -> None:
    """The model and the clients' states of a federation are those of the simulation; `sites` has what sites keep."""
    federation = LocalFederation(folder)
    sites = federation.folder / "sites" if sites is None else sites
    there = federation.run
    for name in sorted(path.name for path in simulation.glob("model*.safetensors")):
        assert (there / name).read_bytes() == (simulation / name).read_bytes(), name
    terms = recorded_terms(there)
    for number, name in enumerate(terms.names):
        kept = SiteStates(sites / name / terms.run / STATES)
        expected = here.state.clients.get(number)
        if expected is not None:
            mine = kept[here.state.clients.counted(number)]
            assert mine.keys() == expected.keys() and all(torch.equal(mine[n], expected[n]) for n in mine), name


class Parts:
    """The parts of a federation, each of which can be killed and started again."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        variables: Mapping[str, Mapping[str, str]] | None = None,
        tls: bool = False,
    ) -> None:
        self.variables = variables or {}  # of the environment of a site, by its name
        self.federation = prepared(folder, config, config.data.clients)[0]
        assert self.federation.dealt is not None
        self.names, self.address = list(self.federation.dealt.sites), f"127.0.0.1:{free_port()}"
        if tls:
            self.federation.secure()
        self.link = self.federation.start_link(self.address)
        self.federation.register_sites(self.address)
        self.sites = {name: self._started(name) for name in self.names}
        self.run = self.federation.start_run(self.address)
        self.last: list[str] = []  # sites of the last cohort

    def processes(self, program: str) -> list[int]:
        return [pid for pid in self.federation.processes() if program in _command(pid)]

    def after_round(self, round: int, seconds: float = 300) -> None:
        metrics = self.federation.run / "metrics.jsonl"
        eventually(lambda: metrics.is_file() and metrics.read_text().count("\n") >= round, seconds)

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def kill_site(self, name: str) -> None:
        """The SuperNode of a site, and all processes that it has started."""
        folder = str(self.federation.folder / "sites" / name)
        node = self.sites[name]
        found = [pid for pid in self.federation.processes() if folder in _command(pid) or pid == node.pid]
        self.kill(*_with_descendants(found))
        node.wait()

    def restart_site(self, name: str) -> None:
        self.sites[name] = self._started(name)

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        return self.federation.start_site(name, self.address, self.variables.get(name))

    def restart_run(self) -> None:
        self.run = self.federation.start_run(self.address)

    def finished(self, seconds: float = 400) -> None:
        self.run.wait(timeout=seconds)
        eventually((self.federation.run / "model.safetensors").is_file, 5)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _with_descendants(pids: list[int]) -> set[int]:
    return {found for pid in pids for found in {pid} | descendants(pid)}


@contextmanager
def parts_of(
    config: Config,
    folder: Path,
    variables: Mapping[str, Mapping[str, str]] | None = None,
    tls: bool = False,
    kind: type[Parts] | None = None,
) -> Iterator[Parts]:
    parts = (kind or Parts)(config, folder, variables, tls)
    try:
        yield parts
    finally:
        parts.federation.down()


def config_of(**changes: Any) -> Config:
    return load_config({**CONFIG, **changes})
