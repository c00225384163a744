"""Client drift (`evaluate.drift`): how far local models move from the global one, and how far from each other.

A client measures the distance of its local model from the global one and sends it as one number. The rest is made
where uploads are read: the norm of every delta, and the sum of the deltas scaled to norm 1. That sum is added with the
uploads, in their order and in their blocks, so it has the same bits in every engine. Norms are float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fedadc.models.vectors import State, Vector
from fedadc.training.agreement import DELTA
from fedadc.training.state import Metrics

UNIT = DELTA + "unit"  # among the sums: delta scaled to norm 1. No upload that was read has a name like this


class ClientDrift(NamedTuple):
    """What the server knows of one client's drift."""

    distance: float  # of its local model from the global one, over the part that is sent
    norm: float | None  # of its delta, as the server reads it; None: it has sent no delta


def norm_of(vector: Vector) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def drift_of(distance: float, upload: State) -> tuple[ClientDrift, State]:
    """The drift of one client, and what its upload adds to the sums; zeros if delta is zero and has no direction."""
    if "delta" not in upload:
        return ClientDrift(distance, None), {}
    delta = upload["delta"]
    norm = norm_of(delta)
    delta = delta.to(torch.promote_types(delta.dtype, torch.float32))  # half precision is too coarse for a sum
    return ClientDrift(distance, norm), {UNIT: delta / norm if norm else torch.zeros_like(delta)}


@dataclass
class RoundDrift:
    """Collects the drift of the counted clients of one round, in cohort order."""

    distances: list[float] = field(default_factory=list)
    directions: int = 0  # deltas that are not zero
    _weights: float = 0.0
    _squares: float = 0.0  # weight × squared norm of delta

    def add(self, drift: ClientDrift, weight: float) -> None:
        self.distances.append(drift.distance)
        if drift.norm is not None:
            self.directions += drift.norm > 0
            self._weights += weight
            self._squares += weight * drift.norm**2

    def metrics(self, mean: State, unit_sum: Vector | None, momentum: Vector | None) -> Metrics:
        """The figures of the round, from the mean upload, the sum of the unit uploads and the m before the update."""
        found: Metrics = {"drift_distance": sum(self.distances) / len(self.distances)}
        if unit_sum is None:
            return found
        k, center = self.directions, norm_of(mean["delta"])
        if k > 1:
            cosine = (norm_of(unit_sum) ** 2 - k) / (k * (k - 1))  # ||sum||² has k ones and every pair twice
            found["drift_cosine"] = max(-1.0, min(1.0, cosine))
        found["drift_spread"] = math.sqrt(max(0.0, self._squares / self._weights - center**2))
        if momentum is not None and momentum.shape == mean["delta"].shape:
            norms = center * norm_of(momentum)
            if norms > 0:  # m is zero before the first update
                cosine = float((mean["delta"].double() * momentum).sum()) / norms
                found["drift_momentum_cosine"] = max(-1.0, min(1.0, cosine))
        return found
