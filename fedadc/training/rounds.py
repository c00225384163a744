"""THE outer loop: a generator of round results. Evaluating, stopping, recording and plotting consume its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from fedadc.communication.ledger import Bytes
from fedadc.communication.network import Network
from fedadc.data.dataset import Array
from fedadc.errors import Diverged, require
from fedadc.models.vectors import State
from fedadc.system.determinism import deterministic
from fedadc.training.aggregate import OrderedMean, PartialSum
from fedadc.training.client_states import ClientStates, StateHandle
from fedadc.training.faults import Faults
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.replica import ServerReplica
from fedadc.training.server import IF_DIVERGED, Server
from fedadc.training.state import Round, RunState
from fedadc.views.local_work import LocalWork
from fedadc.views.round_info import RoundInfo

Weighting = Literal["uniform", "samples"]
RunClients = Callable[[ServerBroadcast, Sequence[ClientTask]], Iterator[PartialSum]]  # an engine's


@dataclass(frozen=True)
class Training:
    """What the outer loop needs of a federation: the server's half, and a way to run clients. No sample, no model."""

    server: Server
    work: LocalWork
    client_sizes: Array  # training samples of every client
    downlink: tuple[str, ...]  # names of the server vectors that travel with theta
    select: Callable[[int], Array]  # the cohort of a round
    weighting: Weighting
    faults: Faults
    network: Network
    replica: ServerReplica | None  # where clients repeat the server's update
    run_clients: RunClients
    seed: int

    @property
    def clients(self) -> int:
        """The number of clients, N."""
        return len(self.client_sizes)


def train(training: Training, rounds: int, state: RunState) -> Iterator[Round]:
    """Train the rounds from state.round + 1 to `rounds`, and yield the result of each."""
    horizon = state.horizon or rounds
    for t in range(state.round + 1, rounds + 1):
        versions = _versions(state)
        with deterministic():
            result = one_round(training, t, horizon, state)
        require(
            _versions(state) == versions,
            f"{type(training.server.method).__name__} overwrote the state of a past round.",
        )
        state = result.state
        yield result


def one_round(training: Training, t: int, horizon: int, state: RunState) -> Round:
    """Select a cohort, send, train its clients, add up in cohort order, update."""
    began = time.perf_counter()
    lr = training.work.lr_of(t, horizon)
    chosen = training.select(t)
    sizes = training.client_sizes[chosen]
    dropped, slow, steps = training.faults.draw(chosen, training.work.count_steps(sizes), training.seed, t)
    cohort = _cohort_order(chosen, steps)
    reporting = dict(zip(chosen[~dropped].tolist(), steps[~dropped].tolist(), strict=True))

    broadcast = ServerBroadcast(t, lr, state.theta, {name: state.server[name] for name in training.downlink})
    uploads = _Uploads(training, t, state.clients)
    for part in training.run_clients(broadcast, _tasks(training, cohort, reporting, state)):
        uploads.add(part)
    mean = uploads.mean()

    info = RoundInfo(round=t, lr=lr, counted=uploads.counted, clients=training.clients)
    theta, server = training.server.updated(state.theta, state.server, mean, info)
    if training.replica is not None:
        training.replica.require_same_update(state.theta, state.server, mean, info, (theta, server))
    ledger, links = training.network.carry(t, cohort, reporting, uploads.sent, mean, state.links)
    after = RunState(t, theta, server, state.clients.updated(uploads.states), horizon, links)
    samples = training.work.count_samples(sizes[~dropped], steps[~dropped])
    seconds = time.perf_counter() - began
    return Round(
        t, lr, uploads.loss, tuple(cohort.tolist()), ledger, samples, seconds, after,
        dropped=tuple(chosen[dropped].tolist()), slow=tuple(chosen[slow].tolist()), skipped=tuple(uploads.skipped),
    )  # fmt: skip


def _cohort_order(cohort: Array, steps: Array) -> Array:
    """Most steps first, then by number. Uploads are added in this order, whichever client finishes first."""
    return cohort[np.lexsort((cohort, -steps))]


def _tasks(training: Training, cohort: Array, steps: Mapping[int, int], state: RunState) -> list[ClientTask]:
    """A task for each client of a cohort that will report, in cohort order."""
    by_samples = training.weighting == "samples"
    weights = training.client_sizes[cohort].tolist() if by_samples else [1.0] * len(cohort)
    return [
        ClientTask(client, steps[client], state.clients, float(weight))
        for client, weight in zip(cohort.tolist(), weights, strict=True)
        if client in steps
    ]


@dataclass
class _Uploads:
    """Collects what the clients of one round returned, in cohort order."""

    training: Training
    round: int
    known: ClientStates  # before the round
    sent: dict[int, Bytes] = field(default_factory=dict)  # by each client
    states: dict[int, StateHandle] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sum = OrderedMean(self.training.server.method.tracked, self.training.clients)

    def add(self, part: PartialSum) -> None:
        self._sum.add(part)
        for result in part.results:
            self.sent[result.client] = result.sent
            if not result.finite:
                self.skipped.append(result.client)
                _require_may_skip(self.training.faults, f"round {self.round}, client {result.client}")
                continue
            self.losses.append(result.loss)
            if result.state or result.client in self.known:
                self.states[result.client] = self.known.store.keep(result.state, self.round)

    @property
    def counted(self) -> int:
        return self._sum.count

    @property
    def loss(self) -> float:
        """Mean over the counted clients; NaN if there is none."""
        return sum(self.losses) / len(self.losses) if self.losses else float("nan")

    def mean(self) -> State | None:
        """The mean upload; None if no upload is counted."""
        if self.skipped and not self.counted:
            raise Diverged(f"round {self.round}: no client's update is finite, training has diverged; {IF_DIVERGED}")
        return self._sum.result() if self.counted else None


def with_events(stream: Iterable[Round], take_events: Callable[[], tuple[str, ...]]) -> Iterator[Round]:
    """The same rounds, with what an engine has reported since the last one."""
    for result in stream:
        events = take_events()
        yield replace(result, events=events) if events else result


def _require_may_skip(faults: Faults, where: str) -> None:
    if faults.bad_update == "stop":
        raise Diverged(
            f"{where}: its update is not finite; faults.bad_update=skip would continue without it, or {IF_DIVERGED}"
        )


def _versions(state: RunState) -> list[int]:
    """How often each tensor of a state was written to."""
    return [v._version for v in (state.theta, *state.server.values())]
