"""A cluster of two nodes gives the bits of one process, whoever dies; `make test-cluster` has more."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from clusters import SmallCluster, outcome, ray_workers, small_cluster
from conftest import small_federation
from family import eventually, linux
from fedadc.cluster.pool import NodeState
from fedadc.cluster.settings import RayCluster
from fedadc.federation import Federation
from fedadc.methods import METHODS
from fedadc.models import MLP
from fedadc.training.state import Round
from fedadc.views.local_work import LocalWork

pytestmark = linux
LARGE = 4000  # hidden units: a state of more than 100 kB, which Ray keeps on the node


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    with small_cluster(2) as started:
        yield started


def federation(method: str, hidden: int, **settings: Any) -> Federation:
    torch.manual_seed(0)
    return Federation(
        model=MLP((5,), 4, [hidden]).double(), data=small_federation(clients=20), method=METHODS[method](),
        local=LocalWork(epochs=2, batch_size=4, lr=0.1), **settings,
    )  # fmt: skip


def test_two_nodes_give_the_bits_of_one_process_and_states_stay_on_them(cluster: SmallCluster) -> None:
    here = list(federation("scaffold", LARGE, cohort=10).rounds(8))
    trained = federation("scaffold", LARGE, cohort=10, engine=RayCluster(address=cluster.address, patience=180))
    there: list[Round] = []
    before: dict[int, str] = {}  # client -> node that has its state
    stayed, moved = 0, 0
    for result in trained.rounds(8):
        there.append(result)
        states: dict[int, Any] = dict(result.state.clients)
        assert all(isinstance(state, NodeState) for state in states.values())
        after = {client: state.node for client, state in states.items()}
        stayed += sum(after[client] == before.get(client) for client in result.cohort)
        moved += sum(after[client] != before.get(client, after[client]) for client in result.cohort)
        before = after
    assert len(set(before.values())) == 2, "one node trained all clients"
    assert 0 < moved < stayed, "states must move for balance, but clients are placed near them"
    trained.close()
    eventually(lambda: not ray_workers())
    assert outcome(there) == outcome(here)  # also of states that were brought here when the cluster was left


def test_lost_workers_and_nodes_change_nothing(cluster: SmallCluster) -> None:
    """A worker is killed, a node joins, then its processes are killed."""
    here = list(federation("fedadc", 6).rounds(24))
    trained = federation("fedadc", 6, engine=RayCluster(address=cluster.address, patience=180))
    there = []
    for result in trained.rounds(24):
        there.append(result)
        if result.round == 2:
            os.kill(ray_workers()[0], signal.SIGKILL)
        if result.round == 4:
            joined = cluster.add_node()
        if result.round == 5:
            eventually(lambda: len(ray_workers()) == 3, 90)
        if result.round == 14:
            cluster.kill_node(joined)
    trained.close()
    assert outcome(there) == outcome(here)
    events = {result.round: result.events for result in there if result.events}
    assert any("was lost in round 3" in event and "its process died" in event for event in events[3]), events
    assert any("has joined the cluster" in event for event in events[5]), events
    assert any("was lost in round 15" in event and "cannot be reached" in event for event in events[15]), events
