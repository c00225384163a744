"""What a cluster offers, and whether its nodes can compute the same bits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedadc.cluster.connection import Connection, Node, import_ray, task_on
from fedadc.cluster.settings import RayCluster
from fedadc.system.node_facts import NodeFacts

PROBE = 8 * 2**20  # bytes that are sent to every node


@dataclass(frozen=True)
class NodeReport:
    node: Node
    workers: int  # that fit on it
    facts: NodeFacts | None  # None: it did not answer
    problems: tuple[str, ...]  # why its results could have other bits, or why it cannot work at all
    milliseconds: float = 0.0  # of a call
    megabytes_per_second: float = 0.0  # to the node; 0: it is this machine's own


def facts_of_node(sent: Any = None) -> NodeFacts:
    """Runs on a node. What is sent to it is not used: only the time that it takes."""
    return NodeFacts.here()


def examine(settings: RayCluster) -> list[NodeReport]:
    """Ask every node of a cluster. One that does not answer within `patience` is reported too."""
    connection = Connection(settings)
    try:
        connection.open()
        nodes = connection.nodes()
        ask = {node: task_on(node, facts_of_node) for node in nodes}
        first = {node: ask[node].remote() for node in nodes}  # starts processes, which import torch, all at once
        return [_examined(node, ask[node], first[node], settings) for node in nodes]
    finally:
        connection.close()


def _examined(node: Node, ask: Any, first: Any, settings: RayCluster) -> NodeReport:
    ray, room = import_ray(), node.room(settings)
    try:
        facts: NodeFacts = ray.get(first, timeout=settings.patience)
        call = _seconds(ask, None, settings.patience)
        transfer = _seconds(ask, ray.put(np.zeros(PROBE, dtype=np.uint8)), settings.patience)
    except ray.exceptions.RayError as error:
        return NodeReport(node, room, None, (_problem(error),))
    here = node.id == ray.get_runtime_context().get_node_id()
    rate = 0.0 if here else PROBE / 1e6 / max(transfer - call, 1e-4)
    return NodeReport(node, room, facts, tuple(facts.differences(NodeFacts.here())), call * 1000, rate)


def _seconds(ask: Any, argument: Any, patience: float) -> float:
    began = time.perf_counter()
    import_ray().get(ask.remote(argument), timeout=patience)
    return time.perf_counter() - began


def _problem(error: Exception) -> str:
    if "No module named" in str(error) or "ModuleNotFoundError" in str(error):
        return "this version of fedadc or what it needs is not installed"
    return "it does not answer in time" if type(error).__name__ == "GetTimeoutError" else type(error).__name__
