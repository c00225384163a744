"""What must be equal on all machines that train together."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass

import torch

from fedadc.system.version import __version__


@dataclass(frozen=True)
class NodeFacts:
    """What must be equal on all nodes, so that they compute the same bits."""

    fedadc: str
    torch: str
    machine: str
    cpu: str  # the instructions that torch uses
    mkl_cbwr: str

    @staticmethod
    def here() -> NodeFacts:
        cpu = torch.backends.cpu.get_cpu_capability()
        return NodeFacts(__version__, torch.__version__, platform.machine(), cpu, os.environ.get("MKL_CBWR", "unset"))

    def differences(self, other: NodeFacts) -> list[str]:
        mine, theirs = asdict(self), asdict(other)
        return [f"{name} {mine[name]} instead of {theirs[name]}" for name in mine if mine[name] != theirs[name]]
