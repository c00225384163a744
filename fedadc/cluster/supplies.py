"""What new workers receive, as references into the object store, so that every node fetches it once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedadc.cluster.connection import Node, import_ray, task_on
from fedadc.cluster.node_data import checksum_of, read_on_node, sample_arrays
from fedadc.data.dataset import Clients, Dataset
from fedadc.engines.trainer import packed
from fedadc.evaluation.metrics import MetricCounter
from fedadc.system.user_code import loaded_modules
from fedadc.training.agreement import Agreement


class Supplies:
    """A user's modules, what a trainer is built from, the samples and the clients."""

    def __init__(
        self,
        load: Callable[[], Dataset] | None,  # reads the data on a node
        patience: float,
        content: tuple[Agreement, MetricCounter],
        data: Dataset,
        clients: Clients,
    ) -> None:
        self._load, self._patience, self._content = load, patience, content
        self._data, self._clients = data, clients
        self._shared: dict[str, Any] = {}  # references of what is sent
        self._asked: set[str] = set()  # nodes
        self._read: dict[str, Any] = {}  # references of samples that were read on a node, by node

    def of(self, node: Node) -> tuple[Any, ...]:
        """The arguments of a worker on a node."""
        samples = self._read.get(node.id) or self._sent("samples", lambda: sample_arrays(self._data))
        return (
            self._sent("modules", loaded_modules),
            self._sent("content", lambda: packed(*self._content, import_ray().cloudpickle.dumps)),
            samples,
            self._sent("clients", lambda: (self._clients.indices, self._clients.offsets)),
        )

    def _sent(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._shared:
            self._shared[name] = import_ray().put(make())
        return self._shared[name]

    def provide(self, nodes: Sequence[Node]) -> Iterator[str]:
        """Let new nodes read the samples from their own disks; yields events about those that cannot."""
        new = {node for node in nodes if node.id not in self._asked}
        self._asked |= {node.id for node in new}
        if self._load is None or not new:
            return
        ray, expected = import_ray(), checksum_of(sample_arrays(self._data))
        reading = {
            node: task_on(node, read_on_node, num_returns=2).remote(self._load, expected)
            for node in sorted(new, key=lambda node: node.address)
        }
        for node, (problem, samples) in reading.items():
            try:
                reason = ray.get(problem, timeout=self._patience)
            except ray.exceptions.RayError as error:
                reason = type(error).__name__
            if reason:
                yield f"the data is sent to node {node}, which cannot read it ({reason})"
            else:
                self._read[node.id] = samples

    def forget(self) -> None:
        """Drop all references; the cluster is left."""
        self._shared.clear()
        self._read.clear()
        self._asked.clear()
