"""The server's half of a real federation, once its sites have agreed: it trains with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from fedadc.config.build import build_coordinator, complete
from fedadc.config.ending import check_end
from fedadc.config.settings import Config, FederationConfig
from fedadc.data.dataset import Samples
from fedadc.data.schema import DataSchema
from fedadc.engines.remote import NoAnswer, Remote
from fedadc.errors import FedadcError, WorkersLost, require
from fedadc.evaluation.evaluator import Evaluator
from fedadc.evaluation.fairness import FAIRNESS
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch, MetricCounter
from fedadc.fields.plain import to_json
from fedadc.models.vectors import State, Vector
from fedadc.server_half import ServerHalf
from fedadc.sites.connections import SiteConnections
from fedadc.sites.deliveries import Deliveries
from fedadc.sites.evaluation import SiteCounter, SiteEvaluator, from_tensors
from fedadc.sites.joining import Terms, admit, agree_again, agreement_of, require_same_data
from fedadc.sites.journal import Event
from fedadc.sites.membership import SiteMembers
from fedadc.sites.packets import Fact, Kind, Lost, Packet
from fedadc.sites.requests import Limits, Requests, share_of
from fedadc.sites.status import DOING
from fedadc.system.determinism import deterministic
from fedadc.system.files import to_safetensors
from fedadc.training.aggregate import PartialSum
from fedadc.training.coordinator import Coordinator
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.state import Round, RunState
from fedadc.views.round_info import RoundInfo

HELD_OUT = ("validation", "test")


class SiteEngine:
    """Runs the clients at their sites, and asks the sites to evaluate."""

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        connections: SiteConnections,
        terms: Terms,
        counter: MetricCounter,
    ) -> None:
        self.config, self.connections, self.terms, self.counter = config, connections, terms, counter
        self.settings = config.federation or FederationConfig()
        self.oldest: Callable[[], int] = lambda: 0  # round to which the server may go back
        downlink = coordinator.network.downlink
        self.deliveries = Deliveries(coordinator.agreement, downlink, coordinator.select, self._post, self._has_post)
        self._remote = Remote(coordinator.agreement, self._exchange, self.deliveries.write, self._left_out)
        self._broadcast: ServerBroadcast | None = None
        self._tasks: dict[int, ClientTask] = {}  # of the round, by client

    def run(
        self, broadcast: ServerBroadcast, tasks: Sequence[ClientTask], states: Mapping[int, State]
    ) -> Iterator[PartialSum]:
        self._broadcast, cohort = broadcast, [task.client for task in tasks]
        self._tasks = {task.client: task for task in tasks}
        self.connections.journal.round = broadcast.round
        usable, heard = 0, set[int]()
        for part in self._remote.run(broadcast, tasks, states):
            usable += part.reports[0].finite
            heard.add(part.reports[0].client)
            yield part
        self.deliveries.trained(broadcast.round, [k for k in cohort if k not in heard], cohort)
        needed = 0 if self.settings.quorum is None else share_of(len(tasks), self.settings.quorum)
        if usable < needed:
            raise WorkersLost(
                f"round {broadcast.round}: {usable} of {len(tasks)} uploads can be used, but {needed} are needed "
                f"(federation.quorum): {'; '.join(self.take_events())[:500]}."
            )

    def _exchange(self, messages: Sequence[tuple[int, bytes]]) -> Iterator[bytes | NoAnswer]:
        broadcast, facts = self._broadcast, self.facts
        assert broadcast is not None
        self.connections.look()  # takes answers to what was sent ahead
        most = self._remote.largest_answer
        packets = [(k, replace(own, most=most)) for k, own in self.deliveries.packets(broadcast, messages, facts)]
        self.deliveries.send_ahead(broadcast, [client for client, _ in packets], len(self.terms.names), facts)
        asked = Requests(
            self.connections,
            "train",
            [(self.terms.names[client], packet) for client, packet in packets],
            self._agree_again,
            self._limits(len(packets)),
            f"upload of round {broadcast.round}",
            self.deliveries.whole,
            usable=self._counts,
        )
        for answer in asked.answers():
            yield answer if isinstance(answer, NoAnswer) else answer.message

    def _counts(self, name: str, answer: Packet) -> bool:
        """Whether an upload can be used."""
        assert self._broadcast is not None
        task = self._tasks[self.terms.names.index(name)]
        return self._remote.is_usable(answer.message, self._broadcast.round, task)

    def _left_out(self, client: int, reason: str, answer: bytes | NoAnswer | None) -> None:
        name = self.terms.names[client]
        event: Event = "refused" if isinstance(answer, bytes) else _event_of(answer)
        text = f"{reason.removeprefix(f'site {name}: ')}; its upload is left out"
        self.connections.journal.happened(event, f"round {self.connections.journal.round}, site {name}: {text}", name)

    @property
    def facts(self) -> dict[str, Fact]:
        return {"run": self.terms.run, "oldest": self.oldest()}

    def _post(self, client: int, packet: Packet, done: Callable[[Packet | Lost], None]) -> None:
        self.connections.post(self.terms.names[client], "keep", packet, done)

    def _has_post(self, client: int) -> bool:
        return self.connections.has_post(self.terms.names[client])

    def take_bytes(self) -> dict[str, float]:
        """The bytes of the messages of training since the last call: heads and bodies, without Flower's framing."""
        counts = {"wire_bytes_up": self.connections.bytes_up, "wire_bytes_down": self.connections.bytes_down}
        found = {name: float(count["train"] + count["keep"]) for name, count in counts.items()}
        for count in counts.values():
            count.clear()
        return found

    def _limits(self, many: int) -> Limits | None:
        """How long the uploads of so many sites are waited for; None: until all have come."""
        settings = self.settings
        if settings.quorum is None and settings.deadline is None:
            return None
        needed = share_of(many, 1.0 if settings.quorum is None else settings.quorum)
        return Limits(settings.deadline or settings.patience, needed, settings.retries)

    def ask(self, kind: Kind, requests: Iterable[tuple[str, Packet]]) -> Iterator[Packet | NoAnswer]:
        """The answers of sites; one that has lost what it kept of the run joins again.

        Where a quorum is enough, or sites may leave, only those that are there are asked, and waited for until the
        deadline.
        """
        requests, settings = list(requests), self.settings
        if settings.quorum is None and not settings.open:
            yield from Requests(self.connections, kind, requests, self._agree_again).answers()
            return
        self.connections.look()
        here = self.connections.found.keys() - self.connections.busy
        limits = Limits(settings.deadline or settings.patience, 0)
        asked = [(name, packet) for name, packet in requests if name in here]
        answers = Requests(self.connections, kind, asked, self._agree_again, limits, "answer").answers()
        for name, _ in requests:
            answer = next(answers) if name in here else self.connections.absent(name)
            if isinstance(answer, NoAnswer):
                event = _event_of(answer) if name in here else "absent"
                self.connections.journal.happened(event, f"{DOING[kind]} without {name}: {answer.reason}", name)
            yield answer

    @contextmanager
    def unless_refused(self, what: str, name: str) -> Iterator[None]:
        """Leave out what a site has sent if it cannot be used."""
        try:
            yield
        except FedadcError as error:
            self.connections.journal.happened("refused", f"{what} without {name}: {error}", name)

    def _agree_again(self, name: str, within: float | None) -> None:
        """Let a site join again that has lost what it kept of the run, but not its data."""
        require_same_data(self.terms, agree_again(self.connections, self.terms, self.config, [name], within))

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
            sizes, name = self.terms.answers[k].sizes, self.terms.names[k]
            if isinstance(answer, Packet):
                with self.unless_refused("evaluation", name):
                    found[k] = from_tensors(answer.body, sizes, self.counter.task, name)
        assert isinstance(self.counter, SiteCounter)
        for batch in (batch for batch in batches if batch.start in found):
            split = batch.split.removeprefix(self.counter.prefix)
            counts = found[batch.start][split]
            if FAIRNESS in self.counter.evaluation.metrics:
                samples = self.terms.answers[batch.start].sizes[split]
                of_site = [batch.start, samples, self.counter.task.sample_total(counts.sums)]
                counts = replace(counts, by_client=np.array([of_site]))
            yield replace(counts, split=batch.split)

    def take_events(self) -> tuple[str, ...]:
        return self.connections.journal.events.take()

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
        before: Callable[[], tuple[int, int]] | None = None,  # the last round, and how many sites had joined until then
    ) -> None:
        self.config = complete(config)
        self.evaluation, self.storage = config.evaluate, config.storage
        self.agreement = agreement_of(config, terms)
        members = None
        if connections.open:
            known = terms.names
            members = SiteMembers(
                connections, self._admit, lambda: self._names or known, before or (lambda: (0, len(known)))
            )
        self.coordinator = build_coordinator(self.config, self.agreement, terms.roster(self.config), members)
        self.counter = self._counter(terms, held or {})
        self.engine = SiteEngine(self.config, self.coordinator, connections, terms, self.counter)
        if self.coordinator.replica is not None:
            self.coordinator.replica = replace(self.coordinator.replica, seen=self._ended)
        self.joined: Callable[[Terms], None] = lambda terms: None  # called when a site has joined
        check_end(self.config, self)

    @property
    def terms(self) -> Terms:
        return self.engine.terms

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of all sites that have joined; none before there is an engine."""
        return self.engine.terms.names if hasattr(self, "engine") else ()

    def _ended(self, info: RoundInfo, mean: State | None) -> None:
        self.engine.deliveries.ended(info, mean, len(self.terms.names), self.engine.facts)

    def _completed(self, stream: Iterator[Round]) -> Iterator[Round]:
        for result in stream:
            yield replace(result, metrics={**result.metrics, **self.engine.take_bytes()})

    def _admit(self) -> None:
        """Let sites join that are connected and fit."""
        for name, answer in admit(self.engine.connections, self.terms, self.config):
            terms = self.terms
            self.engine.terms = replace(terms, names=(*terms.names, name), answers=(*terms.answers, answer))
            self.engine.connections.roster = self.terms.names
            self.coordinator.roster = self.terms.roster(self.config)
            text = f"site {name} has joined as client {len(terms.names)}"
            self.engine.connections.journal.happened("joined", text, name)
            self.joined(self.terms)

    def _counter(self, terms: Terms, held: Mapping[str, Samples]) -> MetricCounter:
        """Counts on the samples that the server has, and lets the sites count on theirs, if they hold out some."""
        inputs, task = self.agreement.inputs, self.agreement.task
        if not terms.holds_out:
            require(
                FAIRNESS not in self.evaluation.metrics,
                "evaluate.metrics: fairness needs sites that hold out rows; the server's own belong to no site.",
            )
            return MetricCounter(self.model, dict(held), inputs, task, self.evaluation)
        prefix = "site_" if held else ""
        empty = Samples(self.agreement.example[:0].cpu(), task.blank_labels(0))
        splits = {**held, **dict.fromkeys(_held_at_sites(terms, prefix), empty)}
        at_sites = lambda: _held_at_sites(self.terms, prefix)  # noqa: E731
        return SiteCounter(self.model, splits, inputs, task, self.evaluation, held_now=at_sites, prefix=prefix)

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
    def data_schema(self) -> DataSchema:
        return self.terms.schema

    @property
    def samples_of_splits(self) -> dict[str, int]:
        sizes = [answer.sizes for answer in self.terms.answers]
        return {
            split: sum(own.get(split, 0) for own in sizes) for split in sorted({name for own in sizes for name in own})
        }

    @property
    def engine_facts(self) -> dict[str, Any]:
        return {"engine": "sites", "federation": to_json(self.terms).decode()}

    def data_checksum(self) -> str:
        """A checksum of what the sites have agreed on and of their data, as they tell it."""
        digest = hashlib.sha256(to_json(replace(self.terms.at_start, run="")))
        digest.update(to_safetensors(self._held_tensors()))
        digest.update(to_safetensors(self.model.fixed()))
        return digest.hexdigest()

    def _held_tensors(self) -> dict[str, Tensor]:
        return {f"{split}.{part}": getattr(s, part) for split, s in self.counter.splits.items() for part in "xy"}


def _event_of(answer: NoAnswer | None) -> Event:
    return "late" if answer is None else answer.kind


def _held_at_sites(terms: Terms, prefix: str) -> dict[str, tuple[int, ...]]:
    """The clients that have samples of a split, by the name of the split."""
    sizes = [answer.sizes for answer in terms.answers]
    clients = {prefix + split: tuple(k for k, own in enumerate(sizes) if own.get(split)) for split in HELD_OUT}
    return {split: found for split, found in clients.items() if found}
