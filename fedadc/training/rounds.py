"""THE outer loop: a generator of round results. Evaluating, stopping, recording and plotting consume its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedadc.communication.ledger import Bytes
from fedadc.data.dataset import Array
from fedadc.errors import Diverged, require
from fedadc.models.vectors import State
from fedadc.system.determinism import deterministic
from fedadc.training.aggregate import OrderedMean, PartialSum
from fedadc.training.client_states import ClientStates, StateHandle
from fedadc.training.coordinator import Coordinator
from fedadc.training.drift import RoundDrift
from fedadc.training.faults import Faults
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.server import IF_DIVERGED
from fedadc.training.state import Metrics, Round, RunState
from fedadc.views.round_info import RoundInfo

RunClients = Callable[[ServerBroadcast, Sequence[ClientTask], ClientStates], Iterator[PartialSum]]  # an engine's


def train(coordinator: Coordinator, run_clients: RunClients, rounds: int, state: RunState) -> Iterator[Round]:
    """Train the rounds from state.round + 1 to `rounds`, and yield the result of each.

    This is the server's half of training: it sees no sample. `run_clients` runs the clients' half, wherever they are.
    """
    horizon = state.horizon or rounds
    for t in range(state.round + 1, rounds + 1):
        versions = _versions(state)
        with deterministic():
            result = one_round(coordinator, run_clients, t, horizon, state)
        require(
            _versions(state) == versions,
            f"{type(coordinator.server.method).__name__} overwrote the state of a past round.",
        )
        state = result.state
        yield result


def one_round(coordinator: Coordinator, run_clients: RunClients, t: int, horizon: int, state: RunState) -> Round:
    """Select a cohort, send, train its clients, add up in cohort order, update."""
    began = time.perf_counter()
    work, seed = coordinator.agreement.work, coordinator.agreement.seed
    lr = work.lr_of(t, horizon)
    chosen = coordinator.select(t)
    roster, members = coordinator.roster_at(t), coordinator.members
    state = coordinator.at_start_of(t, state)
    sizes = roster.sizes[chosen]
    dropped, slow, steps = coordinator.faults.draw(chosen, work.count_steps(sizes), seed, t)
    dropped = dropped | np.isin(chosen, list(members.dropped(t)))
    cohort = _cohort_order(chosen, steps)
    reporting = dict(zip(chosen[~dropped].tolist(), steps[~dropped].tolist(), strict=True))

    vectors = {name: state.server[name] for name in coordinator.downlink}
    broadcast = ServerBroadcast(t, lr, state.theta, vectors, roster.mean_samples)
    uploads = _Uploads(coordinator, t, state.clients, len(roster))
    for part in run_clients(broadcast, _tasks(coordinator, cohort, reporting, state), state.clients):
        uploads.add(part)
    lost = [client for client in reporting if client not in uploads.sent]  # an engine may lose clients
    reporting = {client: h for client, h in reporting.items() if client not in lost}
    mean = uploads.mean()
    drift = uploads.drift_metrics(mean, state.server)

    info = RoundInfo(round=t, lr=lr, counted=uploads.counted, clients=len(roster))
    theta, server = coordinator.server.updated(state.theta, state.server, mean, info)
    if coordinator.replica is not None:
        coordinator.replica.require_same_update(state.theta, state.server, mean, info, (theta, server))
    ledger, links = coordinator.network.carry(t, cohort, reporting, uploads.sent, mean, state.links)
    after = RunState(t, theta, server, state.clients.updated(uploads.states), horizon, links)
    done = np.isin(chosen, list(reporting))
    samples = work.count_samples(sizes[done], steps[done])
    seconds = time.perf_counter() - began
    return Round(
        t, lr, uploads.loss, tuple(cohort.tolist()), ledger, samples, seconds, after, drift,
        dropped=tuple(chosen[~done].tolist()), slow=tuple(chosen[slow].tolist()), skipped=tuple(uploads.skipped),
        joined=members.joined(t), absent=members.absent(t),
    )  # fmt: skip


def _cohort_order(cohort: Array, steps: Array) -> Array:
    """Most steps first, then by number. Uploads are added in this order, whichever client finishes first."""
    return cohort[np.lexsort((cohort, -steps))]


def _tasks(coordinator: Coordinator, cohort: Array, steps: Mapping[int, int], state: RunState) -> list[ClientTask]:
    """A task for each client of a cohort that will report, in cohort order."""
    by_samples, skipped = coordinator.weighting == "samples", coordinator.members.skipped(state.round + 1)
    weights = coordinator.roster.sizes[cohort].tolist() if by_samples else [1.0] * len(cohort)
    return [
        ClientTask(client, steps[client], 0.0 if client in skipped else float(weight), state.clients.counted(client))
        for client, weight in zip(cohort.tolist(), weights, strict=True)
        if client in steps
    ]


@dataclass
class _Uploads:
    """Collects what the clients of one round returned, in cohort order."""

    coordinator: Coordinator
    round: int
    known: ClientStates  # before the round
    clients: int  # N
    sent: dict[int, Bytes] = field(default_factory=dict)  # by each client
    states: dict[int, StateHandle] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    drift: RoundDrift = field(default_factory=RoundDrift)

    def __post_init__(self) -> None:
        self._sum = OrderedMean(self.coordinator.server.method.tracked, self.clients)

    def add(self, part: PartialSum) -> None:
        self._sum.add(part)
        for report in part.reports:
            self.sent[report.client] = report.sent
            if not report.finite:
                self.skipped.append(report.client)
                _require_may_skip(self.coordinator.faults, f"round {self.round}, client {report.client}")
                continue
            self.losses.append(report.loss)
            if report.drift is not None:
                self.drift.add(report.drift, report.weight)
            if report.state or report.state is None or report.client in self.known:
                self.states[report.client] = self.known.store.keep(report.state or {}, self.round)

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
            usable = self.coordinator.faults.usable
            raise Diverged(f"round {self.round}: no client's update is {usable}, training has diverged; {IF_DIVERGED}")
        return self._sum.result() if self.counted else None

    def drift_metrics(self, mean: State | None, server: State) -> Metrics:
        """How far the counted clients drifted, from the mean upload and the server's state before the update."""
        if mean is None or not self.drift.distances:
            return {}
        return self.drift.metrics(mean, self._sum.unit_sum, server.get("m"))


def with_events(stream: Iterable[Round], take_events: Callable[[], tuple[str, ...]]) -> Iterator[Round]:
    """The same rounds, with what an engine has reported since the last one."""
    for result in stream:
        events = take_events()
        yield replace(result, events=events) if events else result


def _require_may_skip(faults: Faults, where: str) -> None:
    if faults.bad_update == "stop":
        raise Diverged(
            f"{where}: its update is not {faults.usable}; faults.bad_update=skip would continue without it, or "
            f"{IF_DIVERGED}"
        )


def _versions(state: RunState) -> list[int]:
    """How often each tensor of a state was written to."""
    return [v._version for v in (state.theta, *state.server.values())]
