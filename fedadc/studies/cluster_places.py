"""Runs on the nodes of a Ray cluster.

A whole run goes to a node that sees the folder of the runs, as on a shared file system. Where there are fewer runs than
room, or no node sees the folder, the clients of a run are trained on the cluster, and its server's half here.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from fedadc.cluster.actor import NodeFacts
from fedadc.cluster.admission import Admission
from fedadc.cluster.connection import Connection, Node, import_ray, on_node
from fedadc.cluster.processes import NodeProcess
from fedadc.cluster.settings import RayCluster
from fedadc.errors import WorkersLost, require
from fedadc.studies.places import LocalProcess, RunProcess
from fedadc.studies.run_process import RunRequest, train_run
from fedadc.system.processes import cores
from fedadc.system.user_code import Notes


@dataclass(frozen=True)
class _Sight:
    """What a node has and sees."""

    facts: NodeFacts
    sees_runs: bool
    sees_data: bool


def look(probe: Path, content: str, data_dir: Path | None) -> _Sight:
    """Runs on a node."""
    try:
        sees = probe.read_text() == content
    except OSError:
        sees = False
    return _Sight(NodeFacts.here(), sees, data_dir is None or data_dir.is_dir())


class ClusterNodes:
    """Room for one run per worker that fits on the nodes."""

    def __init__(self, cluster: RayCluster, device: str, folder: Path, data_dir: Path | None, notes: Notes) -> None:
        self.device = "cuda" if cluster.gpus_per_worker else device
        self._cluster, self._connection = cluster, Connection(cluster)
        self._whole: dict[str, Node] = {}  # nodes for whole runs
        self._running: list[NodeProcess] = []
        self._admission = Admission(cluster)
        try:
            self._connection.open()
            nodes = self._connection.nodes()
            self._look_at(nodes, folder, None if data_dir is None else data_dir.expanduser().resolve(), notes)
        except BaseException:
            self._connection.close()
            raise
        self._places = min(cluster.most_workers, sum(node.room(cluster) for node in nodes))
        require(self._places > 0, "no node of the Ray cluster has room for a worker.", WorkersLost)
        self.room = self._places if self._whole else min(self._places, 2 * cores())

    def _look_at(self, nodes: list[Node], folder: Path, data_dir: Path | None, notes: Notes) -> None:
        """Find the nodes for whole runs: they see a file that is written here."""
        ray = import_ray()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".probe-") as probe:
            probe.write(probe.name)
            probe.flush()
            asked = {
                node: ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_node(node.id))(look).remote(
                    Path(probe.name), probe.name, data_dir
                )
                for node in nodes
            }
            for node, answer in asked.items():
                try:
                    sight: _Sight = ray.get(answer, timeout=self._cluster.patience)
                except ray.exceptions.RayError as error:
                    notes(f"node {node} does not answer ({type(error).__name__}); it is not used for whole runs")
                    continue
                self._judge(node, sight, folder, notes)

    def _judge(self, node: Node, sight: _Sight, folder: Path, notes: Notes) -> None:
        if problem := self._admission.problem(node, sight.facts):
            notes(problem)
        elif not (sight.sees_runs and sight.sees_data):
            missing = f"the folder {folder}" if not sight.sees_runs else "the folder of the data"
            notes(f"node {node} does not see {missing}; it trains clients, not whole runs")
        else:
            self._whole[node.id] = node

    def start(self, request: RunRequest, at_once: int, is_long: bool) -> RunProcess:
        share = self._places // at_once
        node = self._freest_node()
        if node is not None and not (is_long and share > 1):
            cluster, data_dir = self._cluster, request.data_dir
            request = replace(  # a node has another current folder
                request, folder=request.folder.resolve(), out=request.out.resolve(),
                data_dir=None if data_dir is None else data_dir.expanduser().resolve(),
            )  # fmt: skip
            process = NodeProcess(
                node, cluster.cpus_per_worker, cluster.gpus_per_worker, cluster.patience, train_run, request
            )
            self._running.append(process)
            return process
        address = import_ray().get_runtime_context().gcs_address
        shared = replace(self._cluster, address=address, workers=max(1, share))
        device = "cpu" if shared.gpus_per_worker else request.device
        return LocalProcess(replace(request, device=device, cluster=shared))

    def _freest_node(self) -> Node | None:
        """The node for the next whole run; None if all are occupied or lost."""
        busy = Counter(run.node.id for run in self._running)
        room = {
            node.id: node.free_room(self._cluster, busy[node.id])
            for node in self._admission.usable(self._connection.nodes())
            if node.id in self._whole
        }
        best = max(room, key=lambda id: room[id], default=None)
        return self._whole[best] if best is not None and room[best] > 0 else None

    def release(self, process: RunProcess) -> None:
        if isinstance(process, NodeProcess):
            self._running.remove(process)
            if process.lost:
                self._admission.avoid(process.node)

    def close(self) -> None:
        self._connection.close()
