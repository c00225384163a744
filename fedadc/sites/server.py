"""The server's half of a real federation, once its sites have agreed: it trains with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedadc.config.build import build_coordinator, complete
from fedadc.config.settings import Config
from fedadc.data.dataset import Samples
from fedadc.data.roster import Roster
from fedadc.engines.remote import Remote
from fedadc.evaluation.evaluator import Evaluator
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch, MetricCounter
from fedadc.models.vectors import State, Vector
from fedadc.server_half import ServerHalf
from fedadc.sites.connections import SiteConnections
from fedadc.sites.evaluation import SiteCounter, SiteEvaluator, from_tensors
from fedadc.sites.joining import Terms, agree_again, agreement_of, require_same_data
from fedadc.sites.packets import Fact, Kind, Packet
from fedadc.sites.schema import to_json
from fedadc.system.determinism import deterministic
from fedadc.system.files import to_safetensors
from fedadc.training.aggregate import PartialSum
from fedadc.training.agreement import Agreement
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.state import RunState

HELD_OUT = ("validation", "test")


class SiteEngine:
    """Runs the clients at their sites, and asks the sites to evaluate."""

    def __init__(
        self, config: Config, agreement: Agreement, connections: SiteConnections, terms: Terms, counter: MetricCounter
    ) -> None:
        self.config, self.connections, self.terms, self.counter = config, connections, terms, counter
        self.oldest: Callable[[], int] = lambda: 0  # round to which the server may go back
        self._remote = Remote(agreement, self._exchange)

    def run(
        self, broadcast: ServerBroadcast, tasks: Sequence[ClientTask], states: Mapping[int, State]
    ) -> Iterator[PartialSum]:
        return self._remote.run(broadcast, tasks, states)

    def _exchange(self, messages: Sequence[tuple[int, bytes]]) -> Iterator[bytes | None]:
        facts: dict[str, Fact] = {"run": self.terms.run, "oldest": self.oldest()}
        requests = [(self.terms.names[client], Packet.of(message, facts)) for client, message in messages]
        for answer in self.ask("train", requests):
            yield answer.message

    def ask(self, kind: Kind, requests: Iterable[tuple[str, Packet]]) -> Iterator[Packet]:
        """The answers of sites; one that has lost what it kept of the run joins again."""
        return self.connections.ask(kind, requests, self._agree_again)

    def _agree_again(self, name: str) -> None:
        """Let a site join again that has lost what it kept of the run, but not its data."""
        require_same_data(self.terms, agree_again(self.connections, self.terms, self.config, [name]))

    def count(self, theta: Vector, batches: Sequence[EvaluationBatch]) -> Iterator[BatchCounts]:
        held = self.counter.held if isinstance(self.counter, SiteCounter) else {}
        for batch in batches:
            if batch.split not in held:
                with deterministic():
                    yield self.counter.count(theta, batch)
        if at_sites := [batch for batch in batches if batch.split in held]:
            yield from self._count_at_sites(theta, at_sites, {})

    def count_personal(self, state: RunState) -> Iterator[BatchCounts]:
        """Let every site count with its client's own model, as it was after the last round that counted."""
        assert isinstance(self.counter, SiteCounter)
        counted = {k: state.clients.counted(k) for k in range(len(self.terms.names))}
        return self._count_at_sites(state.theta, self.counter.batches_at_sites(), counted)

    def _count_at_sites(
        self, theta: Vector, batches: Sequence[EvaluationBatch], counted: Mapping[int, int]
    ) -> Iterator[BatchCounts]:
        clients, body = sorted({batch.start for batch in batches}), theta.cpu().numpy().tobytes()
        requests = [
            (self.terms.names[k], Packet({"run": self.terms.run, "counted": counted.get(k, -1)}, body=body))
            for k in clients
        ]
        found = {}
        for k, answer in zip(clients, self.ask("count", requests), strict=True):
            sizes, classes = self.terms.answers[k].sizes, self.counter.classes
            found[k] = from_tensors(answer.body, sizes, classes, self.terms.names[k])
        assert isinstance(self.counter, SiteCounter)
        for batch in batches:
            yield replace(found[batch.start][batch.split.removeprefix(self.counter.prefix)], split=batch.split)

    def take_events(self) -> tuple[str, ...]:
        return (*self.connections.events.take(), *self._remote.take_events())

    def close(self) -> None:
        """The sites stay connected."""


class SiteFederation(ServerHalf):
    """A federation of real sites, as its server sees it."""

    engine: SiteEngine

    def __init__(
        self,
        config: Config,
        connections: SiteConnections,
        terms: Terms,
        held: Mapping[str, Samples] | None = None,  # the server's own samples
    ) -> None:
        self.config, self.terms = complete(config), terms
        self.evaluation, self.storage = config.evaluate, config.storage
        self.agreement = agreement_of(config, terms)
        sizes = np.array([answer.sizes["train"] for answer in terms.answers])
        counts = [answer.label_counts for answer in terms.answers]
        reported = None if None in counts else lambda: np.array(counts)
        roster = Roster(sizes, terms.names, reported)
        self.coordinator = build_coordinator(self.config, self.agreement, roster)
        agreement = self.agreement
        self.counter = self._counter(held or {})
        self.engine = SiteEngine(self.config, agreement, connections, terms, self.counter)

    def _counter(self, held: Mapping[str, Samples]) -> MetricCounter:
        """Counts on the samples that the server has, and lets the sites count on theirs, if they hold out some."""
        inputs, classes = self.agreement.inputs, self.agreement.classes
        if not self.terms.holds_out:
            return MetricCounter(self.model, dict(held), inputs, classes, self.evaluation)
        sizes, prefix = [answer.sizes for answer in self.terms.answers], "site_" if held else ""
        clients = {split: tuple(k for k, own in enumerate(sizes) if own.get(split)) for split in HELD_OUT}
        at_sites = {prefix + split: found for split, found in clients.items() if found}
        empty = Samples(self.agreement.example[:0].cpu(), torch.zeros(0, dtype=torch.int64))
        splits = {**held, **dict.fromkeys(at_sites, empty)}
        return SiteCounter(self.model, splits, inputs, classes, self.evaluation, at_sites, prefix)

    @property
    def evaluator(self) -> Evaluator:
        if not isinstance(self.counter, SiteCounter):
            return super().evaluator
        ensembles, clients = self.agreement.server.ensembles, len(self.coordinator.roster)
        engine = self.engine
        return SiteEvaluator(
            self.method, ensembles, clients, self.counter, engine.count, count_personal=engine.count_personal
        )

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def engine_facts(self) -> dict[str, Any]:
        return {"engine": "sites", "federation": to_json(self.terms).decode()}

    def data_checksum(self) -> str:
        """A checksum of what the sites have agreed on and of their data, as they tell it."""
        digest = hashlib.sha256(to_json(replace(self.terms, run="")))
        digest.update(to_safetensors(self._held_tensors()))
        digest.update(to_safetensors(self.model.fixed()))
        return digest.hexdigest()

    def _held_tensors(self) -> dict[str, Tensor]:
        return {f"{split}.{part}": getattr(s, part) for split, s in self.counter.splits.items() for part in "xy"}
