"""Real Ray clusters of several nodes on this machine, and what a run leaves that must not depend on them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from family import descendants, eventually
from fedadc.cluster.connection import QUIET, kept_signal_handlers
from fedadc.training.state import Round

STORE = 150 * 2**20  # bytes of a node's object store


class SmallCluster:
    """A head and further nodes, one CPU each."""

    def __init__(self, nodes: int) -> None:
        os.environ.update({**QUIET, "RAY_worker_niceness": "0"})  # other tests run beside this one
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
        with kept_signal_handlers():
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self._cluster.head_node]
        for _ in range(nodes - 1):
            self.add_node()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self, **settings: Any) -> Any:
        with kept_signal_handlers():
            node = self._cluster.add_node(**{"num_cpus": 1, "object_store_memory": STORE, **settings})
        self.nodes.append(node)
        return node

    def kill_node(self, node: Any) -> None:
        """End all processes of a node at once, as a power cut would."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        (server,) = [p.process.pid for p in self._cluster.head_node.all_processes["gcs_server"]]
        os.kill(server, signal.SIGKILL)

    def kill_all(self) -> None:
        """All processes of Ray, as `ray stop` does on every node."""
        self._cluster.shutdown()

    def end(self) -> None:
        import ray

        ray.shutdown()  # where a test failed
        self._cluster.shutdown()


@contextmanager
def small_cluster(nodes: int) -> Iterator[SmallCluster]:
    cluster = SmallCluster(nodes)
    try:
        yield cluster
    finally:
        cluster.end()
        eventually(lambda: not ray_workers(), 30)


def ray_workers(name: str = "ClientActor") -> list[int]:
    """The processes of our workers on the nodes that this process has started; Ray names them after their class."""
    found = []
    for process in descendants(os.getpid()):
        try:
            if Path(f"/proc/{process}/cmdline").read_bytes().startswith(f"ray::{name}".encode()):
                found.append(process)
        except OSError:  # it has ended
            pass
    return sorted(found)


def outcome(rounds: list[Round]) -> tuple[Any, ...]:
    """All bits of a run, as numbers."""
    last = rounds[-1].state
    clients = {k: {n: v.tolist() for n, v in state.items()} for k, state in last.clients.items()}
    records = [(r.train_loss, r.metrics, r.cohort, r.bytes_up) for r in rounds]
    return last.theta.tolist(), {n: v.tolist() for n, v in last.server.items()}, clients, records
