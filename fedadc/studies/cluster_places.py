"""Runs on the nodes of a Ray cluster.

A whole run goes to a node that sees the folder of the runs, as on a shared file system. Where there are fewer runs than
room, or no node sees the folder, the clients of a run are trained on the cluster, and its server's half here.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedadc.cluster.admission import Admission
from fedadc.cluster.connection import Connection, Node, import_ray, task_on
from fedadc.cluster.processes import NodeProcess
from fedadc.cluster.settings import RayCluster
from fedadc.errors import WorkersLost, require
from fedadc.runs.layout import RAY_LOGS
from fedadc.studies.places import LocalProcess, RunProcess
from fedadc.studies.run_process import RunRequest, train_run
from fedadc.system.node_facts import NodeFacts
from fedadc.system.processes import cores
from fedadc.system.user_code import Notes

LOOK = 5.0  # seconds after which the nodes are looked at again
SETTLE = 5.0  # seconds for Ray to notice that a run has ended
PAUSE = 0.1


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
    """Room for one run per worker that fits on the nodes, also on those that join."""

    def __init__(self, cluster: RayCluster, device: str, folder: Path, data_dir: Path | None, notes: Notes) -> None:
        self.device = "cuda" if cluster.gpus_per_worker else device
        self._cluster, self._folder, self._notes = replace(cluster, logs=folder / RAY_LOGS), folder, notes
        self._data_dir = None if data_dir is None else data_dir.expanduser().resolve()
        self._connection = Connection(self._cluster)
        self._known: set[str] = set()  # nodes that were asked what they see
        self._asked: dict[str, tuple[Node, Any]] = {}  # those that have not answered yet
        self._whole: set[str] = set()  # those for whole runs
        self._running: list[NodeProcess] = []
        self._admission = Admission(cluster)
        self._looked = -math.inf  # when the nodes were looked at last
        folder.mkdir(parents=True, exist_ok=True)
        self._probe = tempfile.NamedTemporaryFile("w", dir=folder, prefix=".probe-")  # noqa: SIM115 - until `close`
        try:
            self._probe.write(Path(self._probe.name).name)
            self._probe.flush()
            self._connection.open()
            require(self.room > 0, "no node of the Ray cluster has room for a worker.", WorkersLost)
        except BaseException:
            self.close()
            raise

    @property
    def room(self) -> int:
        if time.monotonic() - self._looked > LOOK:
            self._looked = time.monotonic()
            nodes = self._usable_nodes()
            self._workers = min(self._cluster.most_workers, sum(node.room(self._cluster) for node in nodes))
        return self._workers if self._whole else min(self._workers, 2 * cores())

    def _usable_nodes(self) -> list[Node]:
        nodes = self._connection.nodes()
        self._look_at([node for node in nodes if node.id not in self._known])
        return [node for node in self._admission.usable(nodes) if node.id not in self._asked]

    def _look_at(self, nodes: list[Node]) -> None:
        """Find the nodes for whole runs: they see a file that is written here. Only at the start it waits for them."""
        at_start = not self._known  # a node that joins later and differs is left out
        self._known |= {node.id for node in nodes}
        ray, probe = import_ray(), Path(self._probe.name)
        for node in nodes:
            self._asked[node.id] = node, task_on(node, look).remote(probe, probe.name, self._data_dir)
        for node, answer in list(self._asked.values()):
            try:
                sight: _Sight = ray.get(answer, timeout=self._cluster.patience if at_start else 0)
            except ray.exceptions.GetTimeoutError:
                if at_start:
                    self._notes(f"node {node} does not answer; it is used as soon as it does")
                continue
            except ray.exceptions.RayError as error:
                self._notes(f"node {node} was lost ({type(error).__name__}); it is not used for whole runs")
            else:
                self._judge(node, sight, at_start)
            del self._asked[node.id]

    def _judge(self, node: Node, sight: _Sight, may_refuse: bool) -> None:
        if problem := self._admission.problem(node, sight.facts, may_refuse):
            self._notes(problem)
        elif not (sight.sees_runs and sight.sees_data):
            missing = f"the folder {self._folder}" if not sight.sees_runs else "the folder of the data"
            self._notes(f"node {node} does not see {missing}; it trains clients, not whole runs")
        else:
            self._whole.add(node.id)

    def start(self, request: RunRequest, at_once: int, is_long: bool) -> RunProcess:
        share = self._workers // at_once
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
        until = time.monotonic() + SETTLE
        while True:
            busy = Counter(run.node.id for run in self._running)
            nodes = [node for node in self._usable_nodes() if node.id in self._whole]
            room = {node: node.free_room(self._cluster, busy[node.id]) for node in nodes}
            best = max(room, key=lambda node: room[node], default=None)
            if best is not None and room[best] > 0:
                return best
            unoccupied = any(node.room(self._cluster) > busy[node.id] for node in nodes)
            if not unoccupied or time.monotonic() > until:  # by us, or by others too
                return None
            time.sleep(PAUSE)  # Ray learns some time after the end of a run that its node is free

    def release(self, process: RunProcess) -> None:
        if isinstance(process, NodeProcess):
            self._running.remove(process)
            if process.lost:
                self._admission.avoid(process.node)

    def close(self) -> None:
        self._connection.close()
        self._probe.close()
