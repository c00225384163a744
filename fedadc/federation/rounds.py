"""THE outer loop: a generator of round results. Evaluating, stopping, recording and plotting consume its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fedadc.data.dataset import Array
from fedadc.errors import Diverged, require
from fedadc.exact import exact
from fedadc.federation.aggregate import OrderedMean
from fedadc.federation.faults import Faults
from fedadc.federation.ledger import Bytes, Ledger
from fedadc.federation.local import Broadcast, Order
from fedadc.federation.selection import hand_out_order
from fedadc.federation.server import ADVICE
from fedadc.federation.store import ClientStates, Entry
from fedadc.methods.base import RoundInfo, State, Vector

if TYPE_CHECKING:
    from fedadc.federation.federation import Federation

Metrics = dict[str, float | list[float | None]]


@dataclass(frozen=True)
class RunState:
    """All that a run carries from one round to the next."""

    round: int  # finished rounds
    theta: Vector
    server: State
    clients: ClientStates  # of clients that have one
    horizon: int = 0  # of schedules that have none of their own: the rounds asked for when the run first started
    links: State = field(default_factory=dict)  # where communication stands: what clients have heard, virtual time


@dataclass(frozen=True)
class Round:
    """What one round did. `state` is the run after it."""

    round: int  # t, from 1
    lr: float
    train_loss: float  # mean over the counted clients of the mean over local steps
    cohort: tuple[int, ...]
    ledger: Ledger  # what travelled
    samples: int  # that the reporting clients used
    seconds: float  # of training
    state: RunState
    metrics: Metrics = field(default_factory=dict)  # test_accuracy, test_loss, ... where evaluated
    dropped: tuple[int, ...] = ()  # of the cohort, by `faults.drop`: they never reported
    slow: tuple[int, ...] = ()  # by `faults.slow`: they did fewer steps
    skipped: tuple[int, ...] = ()  # their updates were not finite
    events: tuple[str, ...] = ()  # what else happened: a worker that died

    @property
    def bytes_up(self) -> int:
        """Over all that reported."""
        return self.ledger.bytes_up

    @property
    def bytes_down(self) -> int:
        return self.ledger.bytes_down

    @property
    def virtual_seconds(self) -> float | None:
        """At its end, by the clock of the run if it has one."""
        return float(self.state.links["now"]) if "now" in self.state.links else None

    @property
    def test_accuracy(self) -> float | None:
        value = self.metrics.get("test_accuracy")
        return value if isinstance(value, float) else None


def train(federation: Federation, rounds: int, state: RunState) -> Iterator[Round]:
    """Rounds state.round + 1 ... rounds."""
    horizon = state.horizon or rounds
    for t in range(state.round + 1, rounds + 1):
        versions = _versions(state)
        with exact():
            result = one_round(federation, t, horizon, state)
        require(
            _versions(state) == versions, f"{type(federation.method).__name__} overwrote the state of a past round."
        )
        state = result.state
        yield result


def one_round(federation: Federation, t: int, horizon: int, state: RunState) -> Round:
    """Select, broadcast, train the cohort, add up in cohort order, update."""
    began = time.perf_counter()
    method, place = federation.method, federation.workplace
    lr = place.work.lr_of(t, horizon)
    chosen = federation.select(t)
    dropped, slow, steps = federation.faults.strike(chosen, place.steps(chosen), federation.seed, t)
    cohort = hand_out_order(chosen, steps)
    reporting = dict(zip(chosen[~dropped].tolist(), steps[~dropped].tolist(), strict=True))
    orders = _orders(federation, cohort, reporting, state)

    broadcast = Broadcast(t, lr, state.theta, {name: state.server[name] for name in federation.downlink})
    mean, losses = OrderedMean(method.tracked, len(place.clients)), []
    sent: dict[int, Bytes] = {}  # by each client
    fresh: dict[int, Entry] = {}
    skipped: list[int] = []
    for part in federation.engine.run(broadcast, orders):
        mean.add(part)
        for report in part.reports:
            sent[report.client] = report.sent
            if not report.finite:
                skipped.append(report.client)
                _require_may_skip(federation.faults, f"round {t}, client {report.client}")
                continue
            losses.append(report.loss)
            if report.state or report.client in state.clients:
                fresh[report.client] = state.clients.store.keep(report.state, t)

    if skipped and not mean.count:
        raise Diverged(f"round {t}: no client's update is finite, training has diverged; {ADVICE}")
    info = RoundInfo(round=t, lr=lr, counted=mean.count, clients=len(place.clients))
    uploaded = mean.result() if mean.count else None
    theta, server = federation.server.updated(state.theta, state.server, uploaded, info)
    if federation.tracker is not None:
        theirs = federation.tracker.updated(state.theta, state.server, uploaded, info)
        federation.tracker.require_same(theirs, theta, server, t)
    ledger, links = federation.wire.carried(t, cohort, reporting, sent, federation.size_of(uploaded), state.links)
    after = RunState(t, theta, server, state.clients.updated(fresh), horizon, links)
    loss = sum(losses) / len(losses) if losses else float("nan")
    samples = place.samples(chosen[~dropped], steps[~dropped])
    seconds = time.perf_counter() - began
    return Round(
        t, lr, loss, tuple(cohort.tolist()), ledger, samples, seconds, after,
        dropped=tuple(chosen[dropped].tolist()), slow=tuple(chosen[slow].tolist()), skipped=tuple(skipped),
    )  # fmt: skip


def _orders(federation: Federation, cohort: Array, steps: Mapping[int, int], state: RunState) -> list[Order]:
    """For each client of a cohort that will report, in its order."""
    by_samples, clients = federation.weighting == "samples", federation.clients
    weights = clients.sizes_of(cohort).tolist() if by_samples else [1.0] * len(cohort)
    return [
        Order(client, steps[client], state.clients, float(weight))
        for client, weight in zip(cohort.tolist(), weights, strict=True)
        if client in steps
    ]


def with_events(stream: Iterable[Round], heard: Callable[[], tuple[str, ...]]) -> Iterator[Round]:
    """The same rounds, with what an engine has to tell since the last one."""
    for result in stream:
        events = heard()
        yield replace(result, events=events) if events else result


def _require_may_skip(faults: Faults, where: str) -> None:
    if faults.bad_update == "stop":
        raise Diverged(f"{where}: its update is not finite; faults.bad_update=skip would go on without it, or {ADVICE}")


def _versions(state: RunState) -> list[int]:
    """How often each tensor of a state was written to."""
    return [v._version for v in (state.theta, *state.server.values())]
