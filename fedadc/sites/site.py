"""The site's half of a federation: it reads its own data, trains its one client, and keeps the client's states.

Nothing is kept in memory between two requests: a transport may start a process for every one of them.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from fedadc.config.build import build_agreement, complete
from fedadc.config.settings import Config
from fedadc.data.dataset import Samples
from fedadc.errors import FedadcError, RunDamaged, require
from fedadc.evaluation.metrics import MetricCounter
from fedadc.sites.evaluation import to_tensors
from fedadc.sites.node import NodeSettings, file_of
from fedadc.sites.packets import NOT_JOINED, PROBLEM, Kind, Packet
from fedadc.sites.schema import DataSchema, from_json, to_json
from fedadc.sites.site_data import SiteData, read_site_data
from fedadc.sites.site_states import SiteStates
from fedadc.system.determinism import deterministic
from fedadc.system.files import checksum, to_safetensors, write_file
from fedadc.system.version import __version__
from fedadc.training.agreement import Agreement
from fedadc.training.client import Client

log = logging.getLogger("fedadc")
JOINED, SAMPLES, STATES = "joined.json", "samples.safetensors", "states"


@dataclass(frozen=True)
class Joined:
    """What a site keeps of the run that it takes part in."""

    run: str
    number: int  # of its client in the roster
    channels_last: bool
    holds_out: bool
    schema: DataSchema
    source: str  # of the data: changes if the file does


@dataclass(frozen=True)
class SiteAnswer:
    """What a site tells when it has agreed to take part."""

    sizes: dict[str, int]  # samples of every split
    label_counts: tuple[int, ...] | None  # of its training samples; None: not asked for
    data: str  # checksum of its samples
    agreement: str  # fingerprint of what it will train with


@dataclass(frozen=True)
class Site:
    """One site, with one client."""

    settings: NodeSettings
    config: Config  # of the federation, without data

    @property
    def name(self) -> str:
        return self.settings.client

    def reply(self, kind: Kind, request: Packet) -> Packet:
        """Do what the server asks for, or say in one sentence why it cannot be done."""
        try:
            return self.answer(kind, request)
        except FedadcError as error:
            log.error("%s: %s", kind, error)
            return Packet({PROBLEM: str(error), NOT_JOINED: isinstance(error, NotJoined)})

    def answer(self, kind: Kind, request: Packet) -> Packet:
        if kind == "hello":
            return Packet({"client": self.name, "fedadc": __version__})
        if kind == "describe":
            data = self._read(bool(request.facts["holds_out"]))
            return Packet(body=to_json(data.summary(json.loads(str(request.facts["as_text"])))))
        if kind == "agree":
            return Packet(body=to_json(self._agree(request)))
        run = SiteRun.opened(self, str(request.facts["run"]))
        return run.train(request) if kind == "train" else run.count(request)

    def _read(self, holds_out: bool) -> SiteData:
        return read_site_data(self.settings.data_path, self.name, self.config, holds_out)

    def _agree(self, request: Packet) -> SiteAnswer:
        facts = request.facts
        joined = Joined(
            str(facts["run"]), int(facts["number"]), bool(facts["channels_last"]), bool(facts["holds_out"]),
            from_json(DataSchema, request.body, "the server"), self.source(),
        )  # fmt: skip
        samples = self._read(joined.holds_out).samples(joined.schema)
        content = to_safetensors({f"{split}.{part}": getattr(s, part) for split, s in samples.items() for part in "xy"})
        run = SiteRun(self, joined, samples)
        counts = None
        if facts["label_counts"]:
            require(
                self.settings.allows_label_counts,
                f"site {self.name} does not tell its label counts, which the selection needs; the site can allow it.",
            )
            labels = samples["train"].y.numpy()
            counts = tuple(np.bincount(labels, minlength=len(joined.schema.classes)).tolist())
        run.folder.mkdir(parents=True, exist_ok=True)
        write_file(run.folder / SAMPLES, content)
        write_file(run.folder / JOINED, to_json(joined))
        sizes = {split: len(own) for split, own in samples.items()}
        return SiteAnswer(sizes, counts, checksum(content), run.agreement.fingerprint())

    def states(self, run: str) -> SiteStates:
        """The states of its client in a run."""
        return SiteStates(_folder(self, run) / STATES)

    def source(self) -> str:
        """What changes when the data does: names, sizes and times of its files."""
        path = file_of(self.settings.data_path)[0]
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        found = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
        require(bool(found), f"site {self.name} has no data at {path}.")
        return checksum(json.dumps(found).encode())


@dataclass(frozen=True)
class SiteRun:
    """A site's part in one run: it has agreed, and its samples are ready on its disk."""

    site: Site
    joined: Joined
    samples: dict[str, Samples]

    @staticmethod
    def opened(site: Site, run: str) -> SiteRun:
        """The run that a site has joined; an error if it has not, or if its data has changed since."""
        folder = _folder(site, run)
        require((folder / JOINED).is_file(), f"site {site.name} has not joined run {run}.", NotJoined)
        joined = from_json(Joined, (folder / JOINED).read_bytes(), str(folder / JOINED))
        require(joined.source == site.source(), f"the data of site {site.name} has changed.", NotJoined)
        try:
            tensors = load_file(folder / SAMPLES)
        except Exception as error:
            raise NotJoined(f"{folder / SAMPLES} is damaged.") from error
        splits = {name.partition(".")[0] for name in tensors}
        return SiteRun(site, joined, {s: Samples(tensors[f"{s}.x"], tensors[f"{s}.y"]) for s in sorted(splits)})

    @property
    def folder(self) -> Path:
        return _folder(self.site, self.joined.run)

    @cached_property
    def agreement(self) -> Agreement:
        config = complete(self.site.config)
        config = replace(config, model=replace(config.model, channels_last=self.joined.channels_last))
        return build_agreement(config, self.joined.schema.spec, self.samples["train"])

    def train(self, request: Packet) -> Packet:
        states = self.site.states(self.joined.run)
        client = Client(self.agreement, self.joined.number, self.samples["train"], states)
        answer = client.answer(request.message)
        states.forget(int(request.facts["oldest"]))
        return Packet.of(answer, {})

    def count(self, request: Packet) -> Packet:
        """Count the predictions of a model, or of the client's own one, on the site's test and validation samples."""
        agreement, held = self.agreement, {s: own for s, own in self.samples.items() if s != "train"}
        counter = MetricCounter(agreement.model, held, agreement.inputs, agreement.classes, self.site.config.evaluate)
        theta = torch.frombuffer(bytearray(request.body), dtype=agreement.start.dtype)
        require(theta.shape == agreement.start.shape, "the model to evaluate has another size.")
        personal = int(request.facts["personal"])
        if personal >= 0:  # the last round whose state of the client took effect; 0: none
            own = self.site.states(self.joined.run)[personal] if personal else agreement.method.client_state(theta)
            theta = agreement.method.personal(theta, own)
        with deterministic():
            counts = [counter.count(theta, batch) for batch in counter.batches()]
        return Packet(body=to_safetensors(to_tensors(counts)))


class NotJoined(FedadcError):
    """The site must agree again before it can train: it has nothing, or something else, of this run."""


def _folder(site: Site, run: str) -> Path:
    require(run.isalnum() and len(run) <= 64, f"a run's name must be letters and digits, not {run!r:.60}.", RunDamaged)
    return site.settings.folder / run
