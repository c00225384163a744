"""FedAvg (McMahan et al., 2017; Algorithm 1 of the FedADC paper): H local SGD steps, then the mean of the deltas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedadc.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Local SGD, then the plain mean of the clients' models."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
