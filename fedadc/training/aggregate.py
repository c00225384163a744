"""The mean of the uploads, added in cohort order in blocks of 8: the sum does not depend on who finished first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fedadc.errors import require
from fedadc.models.vectors import State
from fedadc.training.messages import ClientResult

BLOCK = 8  # part of the result's bits: an engine may add whole blocks ahead, never other groups


@dataclass(frozen=True)
class PartialSum:
    """One client of the cohort, or a whole block that was added ahead: the weighted sum, and who is in it."""

    sum: State  # of the finite ones; {} if there is none
    results: Sequence[ClientResult]  # in cohort order; their own uploads may be gone

    @staticmethod
    def of(result: ClientResult, tracked: Collection[str]) -> PartialSum:
        return PartialSum(weighted(result.upload, result.weight, tracked) if result.finite else {}, (result,))


def weighted(upload: State, weight: float, tracked: Collection[str] = ()) -> State:
    """An upload times its weight; tracked keys (SCAFFOLD's c) have none."""
    return {key: v if weight == 1 or key in tracked else v * weight for key, v in upload.items()}


class OrderedMean:
    """Sum of weight × upload over sum of weights, key by key. Add in cohort order, then ask for the result.

    Tracked keys are the plain sum over the number of all clients, whatever the weights. A client whose update is not
    finite keeps its place in its block, empty, so that who shares a block does not depend on it.
    """

    def __init__(self, tracked: Collection[str] = (), clients: int = 0) -> None:
        self.count = 0  # of those in the sum
        self._seen = 0
        self._tracked, self._clients = tracked, clients
        self._weights = 0.0
        self._total: State = {}
        self._block: State = {}

    def add(self, part: PartialSum) -> None:
        if self._seen % BLOCK == 0 and self._block:
            self._total, self._block = added(self._total, self._block), {}
        whole = len(part.results) == BLOCK and self._seen % BLOCK == 0
        assert whole or len(part.results) == 1, "an engine added ahead what is not a block"
        self._seen += len(part.results)
        counted = [result for result in part.results if result.finite]
        if not counted:
            return
        missing = [key for key in self._tracked if key not in part.sum]
        require(not missing, f"{', '.join(missing)} is tracked, but the uploads have only {', '.join(part.sum)}.")
        for result in counted:
            self.count += 1
            self._weights += result.weight
        if whole:
            self._total = added(self._total, part.sum)
        else:
            self._block = added(self._block, part.sum)

    def result(self) -> State:
        total = added(self._total, self._block) if self._block else self._total
        self._total, self._block = total, {}
        return {key: v / (self._clients if key in self._tracked else self._weights) for key, v in total.items()}


def added(total: State, part: State) -> State:
    """The sum so far with one more in it; a new one if it is the first."""
    if not total:
        return {key: vector.clone() for key, vector in part.items()}  # the part belongs to whoever sent it
    alike = total.keys() == part.keys() and all(total[key].shape == part[key].shape for key in part)
    require(alike, "the clients' uploads differ in their names or shapes, so they have no mean.")
    for key, vector in part.items():
        total[key].add_(vector)
    return total
