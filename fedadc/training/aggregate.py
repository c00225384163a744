"""The mean of the uploads, added in cohort order in blocks of 8, whichever client finishes first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fedadc.communication.ledger import Bytes
from fedadc.errors import FedadcError, require
from fedadc.models.vectors import State, Vector
from fedadc.training.agreement import Agreement
from fedadc.training.drift import UNIT, ClientDrift, drift_of
from fedadc.training.faults import all_finite
from fedadc.training.messages import ClientResult

Facts = tuple[int, float, float, Bytes, bool, ClientDrift | None]  # of a report, without the state
BLOCK_LENGTH = 8  # part of the result's bits: an engine may add up whole blocks, never other groups


@dataclass(frozen=True)
class ClientReport:
    """What the server notes about a client whose upload it has read."""

    client: int
    weight: float
    loss: float
    sent: Bytes
    finite: bool  # upload and new state are finite and not too large; if not, neither takes effect
    drift: ClientDrift | None = None  # of a finite update, with `evaluate.drift`
    state: State | None = None  # the client's new state, in a simulation; None: the client keeps it

    @property
    def facts(self) -> Facts:
        return self.client, self.weight, self.loss, self.sent, self.finite, self.drift


@dataclass(frozen=True)
class PartialSum:
    """The weighted sum of one client, or of a whole block of clients that an engine has added up."""

    sum: State  # of the finite uploads; {} if there is none
    reports: Sequence[ClientReport]  # in cohort order


def received(agreement: Agreement, result: ClientResult, weight: float) -> PartialSum:
    """What the server reads from a client's result: its upload, decoded and weighted, and a report."""
    upload = agreement.decoded(result.upload)
    finite = weight > 0 and result.finite and all_finite(upload)
    if finite and agreement.bound is not None:
        bounded = agreement.bound.bounded(upload)
        upload, finite = bounded or upload, bounded is not None
    drift, unit = drift_of(result.distance, upload) if agreement.drift and finite else (None, {})
    sent = agreement.bytes_of(result.upload)
    report = ClientReport(result.client, weight, result.loss, sent, finite, drift, result.state)
    return PartialSum({**weighted(upload, weight, agreement.method.tracked), **unit} if finite else {}, (report,))


def room_for_sum(agreement: Agreement, theta: Vector) -> State:
    """Vectors like those of a sum: delta, what is tracked, and the unit uploads where drift is measured."""
    sums = dict.fromkeys(("delta", *agreement.method.tracked), theta)
    sums |= dict.fromkeys(agreement.method.numbers, theta[:1])
    return sums | drift_of(0.0, sums)[1] if agreement.drift else sums


def weighted(upload: State, weight: float, tracked: Collection[str] = ()) -> State:
    """An upload times its weight; tracked keys (SCAFFOLD's c) are not weighted."""
    return {key: v if weight == 1 or key in tracked else v * weight for key, v in upload.items()}


class OrderedMean:
    """Sum of weight × upload over sum of weights, key by key. Add in cohort order, then ask for the result.

    Tracked keys are the plain sum over the number of all clients, whatever the weights. A client whose update is not
    finite keeps its place in its block, empty, so that who shares a block does not depend on it.
    """

    def __init__(self, tracked: Collection[str] = (), clients: int = 0) -> None:
        self.count = 0  # uploads in the sum
        self.unit_sum: Vector | None = None  # of the deltas scaled to norm 1; known with the result
        self._seen = 0
        self._tracked, self._clients = tracked, clients
        self._weights = 0.0
        self._total: State = {}
        self._block: State = {}

    def add(self, part: PartialSum) -> None:
        if self._seen % BLOCK_LENGTH == 0 and self._block:
            self._total, self._block = added(self._total, self._block), {}
        whole = len(part.reports) == BLOCK_LENGTH and self._seen % BLOCK_LENGTH == 0
        assert whole or len(part.reports) == 1, "an engine added up a group that is not a block"
        self._seen += len(part.reports)
        counted = [report for report in part.reports if report.finite]
        if not counted:
            return
        if missing := [key for key in self._tracked if key not in part.sum]:
            raise FedadcError(f"{', '.join(missing)} is tracked, but the uploads have only {', '.join(part.sum)}.")
        for report in counted:
            self.count += 1
            self._weights += report.weight
        if whole:
            self._total = added(self._total, part.sum)
        else:
            self._block = added(self._block, part.sum)

    def result(self) -> State:
        total = added(self._total, self._block) if self._block else self._total
        self.unit_sum = total.pop(UNIT, self.unit_sum)
        self._total, self._block = total, {}
        return {key: v / (self._clients if key in self._tracked else self._weights) for key, v in total.items()}


def added(total: State, part: State) -> State:
    """Add a part to the sum so far, in place; a new sum if it is the first."""
    if not total:
        return {key: vector.clone() for key, vector in part.items()}  # the part itself belongs to the caller
    alike = total.keys() == part.keys() and all(total[key].shape == part[key].shape for key in part)
    require(alike, "the clients' uploads differ in names or shapes, so they cannot be averaged.")
    for key, vector in part.items():
        total[key].add_(vector)
    return total
