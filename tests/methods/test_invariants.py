"""Invariants after every round, also with lost reports: sums over clients, clients without a report, old states."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from conftest import small_federation
from fedadc.engines.base import Engine
from fedadc.federation import Federation
from fedadc.methods import Ditto, FedADC, FedAvg, FedDyn, FedPer, FedRep, FedYogi, LocalOnly, Method, Scaffold
from fedadc.models import MLP
from fedadc.models.vectors import State
from fedadc.objectives import GlobalDistillation, ModelContrast
from fedadc.schedules import Cosine
from fedadc.training.aggregate import PartialSum
from fedadc.training.client_states import Storage
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.state import Round, RunState
from fedadc.views.local_work import LocalWork

CLIENTS, ROUNDS = 6, 6
SIZES = np.bincount(small_federation(clients=CLIENTS).owners)
STATEFUL: dict[str, Method] = {
    "feddyn": FedDyn(alpha=0.3),
    "feddyn by size": FedDyn(alpha=0.3, alpha_by_size=True),
    "scaffold": Scaffold(server_lr=0.8),
    "moon": FedAvg(objective=ModelContrast()),
    "local only": LocalOnly(),
    "fedper": FedPer(),
    "fedrep": FedRep(head_share=0.5),
    "ditto and moon": Ditto(objective=ModelContrast()),
    "fedgkd": FedAvg(objective=GlobalDistillation(window=3)),
    "scaffold and moon": Scaffold(objective=ModelContrast()),
    "feddyn and fedgkd": FedDyn(objective=GlobalDistillation(window=3)),
    "fedadc": FedADC(beta=0.8, nesterov=True),
    "fedyogi": FedYogi(),
}
EACH = pytest.mark.parametrize("method", STATEFUL.values(), ids=STATEFUL)


@dataclass
class Losing:
    """An engine that loses every other report of a round, and all reports of silent rounds."""

    engine: Engine
    silent: Collection[int] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def run(
        self, broadcast: ServerBroadcast, orders: Sequence[ClientTask], states: Mapping[int, State]
    ) -> Iterator[PartialSum]:
        for index, part in enumerate(self.engine.run(broadcast, orders, states)):
            if broadcast.round not in self.silent and (index + broadcast.round) % 2 == 0:
                yield part


def federation(method: Method, weighting: Any = "uniform", storage: Storage | None = None) -> Federation:
    torch.manual_seed(0)
    return Federation(
        model=MLP((5,), 4, [6], projection=3).double(),
        data=small_federation(clients=CLIENTS),
        method=method,
        local=LocalWork(epochs=1, batch_size=4, lr=0.2, weight_decay=0.01, schedule=Cosine(final=0.2)),
        cohort=4,
        weighting=weighting,
        storage=storage,
    )


def lossy(method: Method, silent: Collection[int] = (), **kw: Any) -> tuple[RunState, list[Round]]:
    """The state before, and copies of the rounds: a later write into an old state would show."""
    losing = federation(method, **kw)
    losing.engine = Losing(losing.engine, silent)
    return losing.start(), [copy.deepcopy(done) for done in losing.rounds(ROUNDS)]


def answered(done: Round) -> set[int]:
    return {client for index, client in enumerate(done.cohort) if (index + done.round) % 2 == 0}


def mean_of(clients: Any, name: str, weights: np.ndarray) -> np.ndarray:
    """The weighted mean over all N clients; a client that has no state yet counts as 0."""
    total = sum(weights[k] * own[name].numpy() for k, own in clients.items())
    return np.asarray(total / weights.sum())


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_run(a: RunState, b: RunState) -> bool:
    """True if two run states are equal bit for bit."""
    return (
        same({"theta": a.theta, **a.server}, {"theta": b.theta, **b.server})
        and list(a.clients) == list(b.clients)
        and all(same(a.clients[k], b.clients[k]) for k in a.clients)
    )


@pytest.mark.parametrize(
    ("method", "name", "weighting", "weights"),
    [
        (Scaffold(server_lr=0.8), "c", "uniform", np.ones(CLIENTS)),
        (Scaffold(server_lr=0.8), "c", "samples", np.ones(CLIENTS)),
        (FedDyn(alpha=0.3), "h", "uniform", np.ones(CLIENTS)),
        # h gains alpha/N · delta where h_k gains alpha_k · delta, so h = (1/N) sum (alpha/alpha_k) h_k, and
        # alpha/alpha_k = n_k / mean(n)
        (FedDyn(alpha=0.3, alpha_by_size=True), "h", "uniform", SIZES),
    ],
)
def test_the_servers_vector_is_the_mean_of_all_clients(
    method: Method, name: str, weighting: Any, weights: np.ndarray
) -> None:
    _, rounds = lossy(method, weighting=weighting)
    for done in rounds:
        seen = done.state.server[name].numpy()
        assert np.abs(seen).max() > 1e-3
        np.testing.assert_allclose(seen, mean_of(done.state.clients, name, weights), rtol=0, atol=1e-12)
    assert 2 < len(rounds[1].state.clients) < CLIENTS  # some have a state and some have none


@EACH
def test_a_lost_report_does_not_change_its_client(method: Method) -> None:
    before, rounds = lossy(method)
    renewed = kept = 0
    for done in rounds:
        old, new, counted = before.clients, done.state.clients, answered(done)
        assert len(counted) == 2
        assert set(new) == (set(old) | counted if new else set())
        for k in old:
            assert same(old[k], new[k]) == (k not in counted)
        renewed += len(counted & set(old))
        kept += len(set(done.cohort) & set(old) - counted)
        before = done.state
    assert (renewed and kept) or not before.clients


@EACH
@pytest.mark.parametrize("silent", [1, 4])
def test_a_round_without_reports_changes_nothing_and_the_run_continues(method: Method, silent: int) -> None:
    start, rounds = lossy(method, silent={silent})
    states = [start, *(done.state for done in rounds)]
    assert [state.round for state in states] == list(range(ROUNDS + 1))
    for t in range(1, ROUNDS + 1):
        assert same_run(states[t], states[t - 1]) == (t == silent)
    assert rounds[silent - 1].bytes_up == 0


@EACH
@pytest.mark.parametrize("memory_gb", [2.0, 0.0])
def test_a_run_continues_from_an_earlier_round_with_the_same_bits(method: Method, memory_gb: float) -> None:
    """In the federation that trained beyond it, and in a new one, in two parts; with states in memory, and in files."""
    used = federation(method, storage=Storage(memory_gb=memory_gb))
    straight = list(used.rounds(ROUNDS))
    assert not same_run(straight[2].state, straight[3].state)
    for other in (used, federation(method)):
        again = list(other.rounds(4, start=straight[2].state))
        again += other.rounds(ROUNDS, start=again[-1].state)
        assert [done.round for done in again] == [4, 5, 6]
        for first, second in zip(straight[3:], again, strict=True):
            assert first.train_loss == second.train_loss
            assert same_run(first.state, second.state)
