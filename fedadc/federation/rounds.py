"""THE outer loop: a generator of round results. Evaluating, stopping, recording and plotting consume its stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedadc.errors import Diverged, FedadcError, require
from fedadc.exact import exact
from fedadc.federation.aggregate import OrderedMean
from fedadc.federation.local import Broadcast, Order, bytes_of
from fedadc.federation.selection import hand_out_order, uniform
from fedadc.federation.store import ClientStates, Entry
from fedadc.methods.base import Method, RoundInfo, State, Vector, pair_of, state_of, vector_like
from fedadc.rng import generator

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


@dataclass(frozen=True)
class Round:
    """What one round did. `state` is the run after it."""

    round: int  # t, from 1
    lr: float
    train_loss: float  # mean over the cohort of the mean over local steps
    cohort: tuple[int, ...]
    bytes_up: int  # over all clients of the cohort
    bytes_down: int
    seconds: float  # of training
    state: RunState
    metrics: Metrics = field(default_factory=dict)  # test_accuracy, test_loss, ... where evaluated

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
    chosen = uniform(len(place.clients), federation.cohort, generator(federation.seed, "cohort", t))
    cohort = hand_out_order(chosen, place.steps(chosen))
    weights = place.clients.sizes_of(cohort) if federation.weighting == "samples" else np.ones(len(cohort))
    told = zip(cohort.tolist(), place.steps(cohort).tolist(), weights.tolist(), strict=True)
    orders = [Order(client, steps, state.clients, float(weight)) for client, steps, weight in told]

    broadcast = Broadcast(t, lr, state.theta, {name: state.server[name] for name in federation.downlink})
    mean, losses, bytes_up = OrderedMean(method.tracked, len(place.clients)), [], 0
    fresh: dict[int, Entry] = {}
    for part in federation.engine.run(broadcast, orders):
        mean.add(part)
        for report in part.reports:
            losses.append(report.loss)
            bytes_up += report.bytes_up
            if report.state or report.client in state.clients:
                _require_finite(report.state, f"round {t}, client {report.client}")
                fresh[report.client] = state.clients.store.keep(report.state)

    theta, server = state.theta, state.server
    if mean.count:
        info = RoundInfo(round=t, lr=lr, counted=mean.count, clients=len(place.clients))
        theta, server = _updated(method, state, mean.result(), info)
    after = RunState(t, theta, server, state.clients.updated(fresh), horizon)
    sent = bytes_of({"theta": broadcast.theta, **broadcast.server}) if method.federated else 0
    loss = sum(losses) / len(losses) if losses else float("nan")
    seconds = time.perf_counter() - began
    return Round(t, lr, loss, tuple(cohort.tolist()), bytes_up, len(cohort) * sent, seconds, after)


def _updated(method: Method, state: RunState, mean: State, info: RoundInfo) -> tuple[Vector, State]:
    """The method's own update, if it is one."""
    name = f"{type(method).__name__}.update"
    try:
        theta, server = pair_of(method.update(state.theta, state.server, mean, info), name)
    except KeyError as error:
        raise FedadcError(f"{name} looks for {error}, but the uploads have {', '.join(mean) or 'nothing'}.") from error
    vector_like(theta, state.theta, name)
    objective = method.objective
    followed = state_of(objective.follow(theta, state.server, info), f"{type(objective).__name__}.follow")
    server = {**state_of(server, name), **followed}
    _require_finite({"theta": theta, **server}, f"round {info.round}")
    return theta, server


def _require_finite(vectors: State, where: str) -> None:
    for name, vector in vectors.items():
        if not bool(torch.isfinite(vector).all()):
            raise Diverged(
                f"{where}: {name} is no longer finite, training has diverged; lower local.lr or set local.clip."
            )


def _versions(state: RunState) -> list[int]:
    """How often each tensor of a state was written to."""
    return [v._version for v in (state.theta, *state.server.values())]
