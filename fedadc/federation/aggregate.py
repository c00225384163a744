"""The mean of the uploads, added in cohort order in blocks of 8: the sum does not depend on who finished first."""

from __future__ import annotations

from collections.abc import Collection

import torch

from fedadc.errors import require
from fedadc.methods.base import State

BLOCK = 8  # part of the result's bits: an engine may add whole blocks ahead, never other groups


class OrderedMean:
    """Sum of weight × upload over sum of weights, key by key. Add in cohort order, then ask for the result.

    Tracked keys (SCAFFOLD's c) are the plain sum over the number of all clients, whatever the weights.
    """

    def __init__(self, tracked: Collection[str] = (), clients: int = 0) -> None:
        self.count = 0
        self._tracked, self._clients = tracked, clients
        self._weights = 0.0
        self._shapes: dict[str, torch.Size] = {}
        self._total: State = {}
        self._block: State = {}

    def add(self, weight: float, upload: State) -> None:
        self._check(upload)
        if self.count % BLOCK == 0:
            _accumulate(self._total, self._block)
            self._block = {}
        self.count += 1
        self._weights += weight
        plain = {key for key in upload if weight == 1 or key in self._tracked}
        _accumulate(self._block, {key: v if key in plain else v * weight for key, v in upload.items()})

    def _check(self, upload: State) -> None:
        shapes = {key: vector.shape for key, vector in upload.items()}
        self._shapes = shapes if self.count == 0 else self._shapes
        require(shapes == self._shapes, "the clients' uploads differ in their names or shapes, so they have no mean.")
        missing = [key for key in self._tracked if key not in upload]
        require(not missing, f"{', '.join(missing)} is tracked, but the uploads have only {', '.join(upload)}.")

    def result(self) -> State:
        total = {key: vector.clone() for key, vector in self._total.items()}
        _accumulate(total, self._block)
        return {key: v / (self._clients if key in self._tracked else self._weights) for key, v in total.items()}


def _accumulate(total: State, part: State) -> None:
    for key, vector in part.items():
        if key in total:
            total[key].add_(vector)
        else:
            total[key] = vector.clone()  # an upload's memory belongs to whoever sent it
