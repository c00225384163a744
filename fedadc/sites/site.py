"""The site's half of a federation: it reads its own data, trains its one client, and keeps the client's states.

Nothing is kept in memory between two requests: a transport may start a process for every one of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load
from torch import Tensor

from fedadc.config.build import build_agreement, complete
from fedadc.config.settings import Config
from fedadc.data.dataset import DataSpec, Normalization, Samples
from fedadc.errors import FedadcError, RunDamaged, require
from fedadc.models.vectors import Vector
from fedadc.sites.checked_files import checked_files, read_checked, write_checked
from fedadc.sites.node import NodeSettings, file_of
from fedadc.sites.packets import HAS, Packet, versions
from fedadc.sites.site_states import SiteStates
from fedadc.system.determinism import deterministic
from fedadc.system.files import checksum, to_safetensors
from fedadc.tasks import Target
from fedadc.training.agreement import Agreement
from fedadc.training.client import Client
from fedadc.training.tracking import TrackedState, unbundled
from fedadc.training.wire import Wire

if TYPE_CHECKING:
    from fedadc.sites.schema import SiteAnswer
    from fedadc.sites.site_data import SiteData

log = logging.getLogger("fedadc")
# four files of a run, and a folder
JOINED, WEIGHTS, REPLICA, LAST_ANSWER, STATES = "joined", "weights", "replica", "answer", "states"
TERMS = "terms"  # name of a tensor that is a text


@dataclass(frozen=True)
class Joined:
    """What a site keeps of the run that it takes part in: its samples, ready for training, and what was agreed on."""

    number: int  # of its client in the roster
    channels_last: bool
    source: str  # of the data: changes if its files do
    spec: DataSpec
    samples: dict[str, Samples]  # by split

    def content(self) -> bytes:
        """A safetensors file."""
        spec, constants = self.spec, self.spec.normalization
        terms = {
            "number": self.number, "channels_last": self.channels_last, "source": self.source,
            "shape": spec.input_shape, "dtype": str(spec.dtype).removeprefix("torch."), "classes": spec.classes,
            "scale": constants.scale, "mean": constants.mean, "std": constants.std,
            "targets": [[t.name, t.center, t.spread, t.scaled, t.mean] for t in spec.targets],
        }  # fmt: skip
        text = torch.frombuffer(bytearray(json.dumps(terms).encode()), dtype=torch.uint8)
        return to_safetensors({**_tensors(self.samples), TERMS: text})

    @staticmethod
    def of(content: bytes) -> Joined:
        tensors = load(content)
        terms = json.loads(tensors.pop(TERMS).numpy().tobytes())
        splits = sorted({name.partition(".")[0] for name in tensors})
        samples = {split: Samples(tensors[f"{split}.x"], tensors[f"{split}.y"]) for split in splits}
        constants = Normalization(terms["scale"], tuple(terms["mean"]), tuple(terms["std"]))
        kind, targets = getattr(torch, terms["dtype"]), tuple(Target(*target) for target in terms.get("targets", ()))
        spec = DataSpec(tuple(terms["shape"]), kind, tuple(terms["classes"]), constants, targets)
        return Joined(terms["number"], terms["channels_last"], terms["source"], spec, samples)


@dataclass(frozen=True)
class Site:
    """One site, with one client."""

    settings: NodeSettings
    config: Config  # of the federation, without data

    @property
    def name(self) -> str:
        return self.settings.client

    def introduction(self, request: Packet) -> Packet:
        """Its name, and what the server asks for at once: what this site has of a run, or what its data is like."""
        said = Packet()
        if "run" in request.facts:
            with suppress(NotJoined):  # the server lets it agree again
                said = self._terms(SiteRun.opened(self, str(request.facts["run"])), request)
        elif "holds_out" in request.facts:
            said = self.describe(request)
        return replace(said, facts={"client": self.name, **versions()})

    def _data(self, request: Packet) -> SiteData:
        from fedadc.sites.site_data import read_site_data  # not needed for training

        return read_site_data(self.settings.data_path, self.name, self.config, bool(request.facts["holds_out"]))

    def describe(self, request: Packet) -> Packet:
        from fedadc.fields.plain import to_json
        from fedadc.sites.schema import permitted

        summary = self._data(request).summary(json.loads(str(request.facts["as_text"])))
        return Packet(body=to_json(permitted(summary, self.settings.allows)))

    def agree(self, request: Packet) -> Packet:
        """Keep what is needed for training, and say what the server must know."""
        run, joined = str(request.facts["run"]), self.joined(request)
        self.settings.own_folder()
        if request.head:
            write_checked(self.folder(run), WEIGHTS, request.head)
        write_checked(self.folder(run), JOINED, joined.content())
        return self._terms(SiteRun(self, run, joined), request)

    def joined(self, request: Packet) -> Joined:
        """What it would keep of a run."""
        from fedadc.data.schema import DataSchema
        from fedadc.fields.plain import from_json

        facts, schema = request.facts, from_json(DataSchema, request.body, "the server")
        samples = self._data(request).samples(schema)
        return Joined(int(facts["number"]), bool(facts["channels_last"]), self.source(), schema.spec, samples)

    def told_sizes(self, samples: Mapping[str, Samples]) -> dict[str, int]:
        """The numbers of samples that it tells, by split."""
        told = ["train"] if "samples" in self.settings.allows else []
        told = list(samples) if self.settings.tells_evaluation else told
        return {split: len(samples[split]) for split in told}

    def _terms(self, run: SiteRun, request: Packet) -> Packet:
        from fedadc.fields.plain import to_json

        return Packet(versions(), body=to_json(self.told(run, bool(request.facts["label_counts"]))))

    def told(self, run: SiteRun, label_counts: bool) -> SiteAnswer:
        """What it says when it takes part; an error if it does not allow what the run needs."""
        from fedadc.sites.schema import SiteAnswer

        samples, counts = run.joined.samples, None
        if label_counts:
            require(
                "label-counts" in self.settings.allows,
                f"site {self.name} does not tell its label counts, which the selection needs; the site can allow it.",
            )
            counts = tuple(torch.bincount(samples["train"].y, minlength=len(run.joined.spec.classes)).tolist())
        sizes = self.told_sizes(samples)
        require(
            not self.config.evaluate.by_class or "label-counts" in self.settings.allows or sizes.keys() <= {"train"},
            f"site {self.name} does not tell the labels of its test samples, which evaluate.metrics needs; the site "
            "can allow label-counts.",
        )
        return SiteAnswer(sizes, counts, checksum(to_safetensors(_tensors(samples))), run.agreement.fingerprint())

    def folder(self, run: str) -> Path:
        """Where it keeps what belongs to a run."""
        valid = run.isalnum() and len(run) <= 64
        require(valid, f"a run's name must be letters and digits, not {run!r:.60}.", RunDamaged)
        return self.settings.folder / run

    def states(self, run: str) -> SiteStates:
        """The states of its client in a run."""
        return SiteStates(self.folder(run) / STATES)

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
    run: str
    joined: Joined

    @staticmethod
    def opened(site: Site, run: str) -> SiteRun:
        """The run that a site has joined; an error if it has not, or if its data has changed since."""
        path = checked_files(site.folder(run)).get(JOINED)
        if path is None:
            raise NotJoined(f"site {site.name} has not joined run {run}.")
        try:
            joined = Joined.of(read_checked(path))
        except (RunDamaged, OSError) as error:
            raise NotJoined(str(error)) from error
        require(joined.source == site.source(), f"the data of site {site.name} has changed.", NotJoined)
        return SiteRun(site, run, joined)

    @property
    def folder(self) -> Path:
        return self.site.folder(self.run)

    @cached_property
    def agreement(self) -> Agreement:
        config = complete(self.site.config)
        config = replace(config, model=replace(config.model, channels_last=self.joined.channels_last, weights=None))
        agreement = build_agreement(config, self.joined.spec, self.joined.samples["train"])
        if (weights := checked_files(self.folder).get(WEIGHTS)) is not None:
            agreement.load_weights(load(read_checked(weights)), "the server's initial weights")
        return agreement

    def train(self, request: Packet) -> Packet:
        """Do a task. If its answer was lost, or took too long, the task comes again: then the answer is sent again."""
        states = self.site.states(self.run)
        state = self._followed(request) if self.site.config.communication.downlink.tracks else None
        task = checksum(request.message if state is None else request.head + state.content())
        answer = self._said(task, states)
        if answer is None:
            own, tells_loss = self.joined.samples["train"], "loss" in self.site.settings.allows
            client = Client(self.agreement, self.joined.number, own, states, tells_loss)
            wire = Wire(self.agreement)
            read = wire.read_task(request.message) if state is None else state.wire.read_call(request.head, state)
            answer = client.do(*read)
            kept = read[0].round if read[0].round in states else 0
            write_checked(self.folder, LAST_ANSWER, f"{task} {kept}\n".encode() + answer)
        states.forget(int(request.facts["oldest"]))
        return Packet.of(answer, {})

    def _said(self, task: str, states: SiteStates) -> bytes | None:
        """The answer to the last task, if it was this one and the state after it is there; None: it must be done."""
        path = checked_files(self.folder).get(LAST_ANSWER)
        if path is None:
            return None
        try:
            facts, _, answer = read_checked(path).partition(b"\n")
        except RunDamaged:
            return None
        known, kept = facts.decode().split()
        return answer if known == task and (kept == "0" or int(kept) in states) else None

    def keep(self, request: Packet) -> Packet:
        """Keep theta and the server's vectors, which a downlink sends before they are needed."""
        return Packet({HAS: self._followed(request).round})

    def _followed(self, request: Packet) -> TrackedState:
        """The state of the server that the site has, after what was sent now."""
        state = TrackedState.empty(self.agreement)
        if (kept := checked_files(self.folder).get(REPLICA)) is not None:
            with suppress(RunDamaged):  # it is sent again
                state.follow([read_checked(kept)])
        if request.body:
            state.follow(unbundled(request.body))
            write_checked(self.folder, REPLICA, state.content())
        return state

    def count(self, request: Packet) -> Packet:
        """Count the predictions of a model, or of the client's own one, on the site's test and validation samples."""
        from fedadc.evaluation.metrics import MetricCounter
        from fedadc.sites.evaluation import to_tensors

        require(self.site.settings.tells_evaluation, f"site {self.site.name} does not tell how good a model is.")
        agreement, held = self.agreement, {s: own for s, own in self.joined.samples.items() if s != "train"}
        counter = MetricCounter(agreement.model, held, agreement.inputs, agreement.task, self.site.config.evaluate)
        theta = self._theta(request) if int(request.facts["counted"]) < 0 else self.own_model(request)
        with deterministic():
            counts = [counter.count(theta, batch) for batch in counter.batches()]
        return Packet(body=to_safetensors(to_tensors(counts, agreement.task, self.site.config.evaluate.by_class)))

    def _theta(self, request: Packet) -> Vector:
        start = self.agreement.start
        theta = torch.frombuffer(bytearray(request.body), dtype=start.dtype)
        require(theta.shape == start.shape, "the model that the server sent has another size.")
        return theta

    def own_model(self, request: Packet) -> Vector:
        """The client's own model: that of the server, with the state of the last round in which the client counted."""
        theta, method, counted = self._theta(request), self.agreement.method, int(request.facts["counted"])
        own = self.site.states(self.run)[counted] if counted else method.client_state(theta)
        return method.personal(theta, own)


class NotJoined(FedadcError):
    """The site must agree again before it can train: it has nothing, or something else, of this run."""


def _tensors(samples: Mapping[str, Samples]) -> dict[str, Tensor]:
    return {f"{split}.{part}": getattr(own, part) for split, own in samples.items() for part in "xy"}
