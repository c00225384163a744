"""Which nodes of a cluster are used: those that compute the same bits and can be reached."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from fedadc.cluster.connection import Node
from fedadc.cluster.settings import RayCluster
from fedadc.errors import WorkersLost
from fedadc.system.node_facts import NodeFacts

AVOIDED = 15.0  # seconds after a first loss; after each further one twice as long


class Admission:
    """Refuses or leaves out nodes that differ, as the settings say, and avoids those that were lost for a while."""

    def __init__(self, settings: RayCluster) -> None:
        self._rule = settings.other_nodes
        self.left_out: set[str] = set()  # nodes that differ
        self._losses = Counter[str]()  # by node
        self._avoided_until: dict[str, float] = {}

    @property
    def expected(self) -> NodeFacts | None:
        """What a node must have; None: anything."""
        return None if self._rule == "use" else NodeFacts.here()

    def usable(self, nodes: Sequence[Node]) -> list[Node]:
        now = time.monotonic()
        return [n for n in nodes if n.id not in self.left_out and now > self._avoided_until.get(n.id, 0.0)]

    def problem(self, node: Node, facts: NodeFacts, may_refuse: bool = True) -> str | None:
        """Why a node is left out, if it differs; an error if the settings say that such nodes are refused."""
        different = [] if self.expected is None else facts.differences(self.expected)
        if not different:
            return None
        message = f"node {node} has {', '.join(different)}"
        if self._rule == "refuse" and may_refuse:
            raise WorkersLost(
                f"{message}, so its results could have other bits; make the nodes equal, or set other_nodes to "
                "'leave out' or 'use'."
            )
        self.left_out.add(node.id)
        return f"{message}; it is left out"

    def avoid(self, node: Node) -> None:
        """Start nothing on a node for a while: Ray needs some seconds to know that a node is dead."""
        self._losses[node.id] += 1
        self._avoided_until[node.id] = time.monotonic() + AVOIDED * 2 ** (self._losses[node.id] - 1)
