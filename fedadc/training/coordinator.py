"""The server's half of a federation: who takes part in a round, what is sent, and what follows from the uploads.

It knows the agreement and a roster of the clients. It has no sample, and no client's state is read here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from numbers import Integral, Real
from typing import Literal

from fedadc.communication.clock import Clock
from fedadc.communication.downlinks import Downlink, Pull
from fedadc.communication.ledger import sizes
from fedadc.communication.network import Network
from fedadc.data.dataset import Array
from fedadc.data.roster import Roster
from fedadc.errors import require
from fedadc.fields.summary import summary
from fedadc.rng import generator
from fedadc.selections import Selection, Uniform
from fedadc.selections.cohorts import ChangingCohorts, Cohorts
from fedadc.training.agreement import Agreement
from fedadc.training.client_states import ClientStates, Storage, Store
from fedadc.training.faults import Faults
from fedadc.training.members import Members
from fedadc.training.replica import ServerReplica
from fedadc.training.server import Server
from fedadc.training.state import RunState
from fedadc.views.setup import Setup

Weighting = Literal["uniform", "samples"]


class Coordinator:
    """Everything that the outer loop (`rounds.train`) needs besides a way to run clients."""

    def __init__(
        self,
        agreement: Agreement,
        roster: Roster,
        *,
        cohort: int | float | None = None,  # clients per round, as a number or as a share; None: all
        selection: Selection | None = None,
        weighting: Weighting = "uniform",
        faults: Faults | None = None,
        downlink: Downlink | None = None,
        clock: Clock | None = None,
        members: Members | None = None,  # who takes part in every round; None: all clients
    ) -> None:
        require(weighting in ("uniform", "samples"), f"weighting must be uniform or samples, not {weighting!r}.")
        self.agreement, self.roster, self.weighting = agreement, roster, weighting
        require(
            selection is None or not selection.needs_label_counts or agreement.task.has_classes,
            f"selection: {type(selection).__name__.lower()} needs label counts, but the labels are numbers (task: "
            f"{agreement.task.name}); use uniform.",
        )
        self.faults, self.members = faults or Faults(), members or Members(len(roster))
        self.cohort = _cohort_size(cohort, len(roster))
        self.select = self._cohorts(selection or Uniform(), cohort)
        self._check_settings()
        self.downlink = self.server.downlink(agreement.start)  # names of the server vectors that are sent with theta
        self.network = self._network(downlink or Pull(), clock)
        require(
            self.members.fixed or not self.network.downlink.tracks,
            f"communication.downlink: {type(self.network.downlink).__name__.lower()} needs the same clients in every "
            "round, but here clients join or are absent; use pull.",
        )
        self.replica = None
        if self.network.downlink.tracks:
            self.replica = ServerReplica.of(self.server, self.downlink, self.network.downlink, agreement.start)

    def _cohorts(self, selection: Selection, cohort: int | float | None) -> Callable[[int], Array]:
        """The cohort of every round, drawn from the clients that are present."""
        seed, members = self.agreement.seed, self.members
        if members.fixed:
            return Cohorts(selection, self.roster, self.cohort, seed)
        return ChangingCohorts(selection, self.roster_at, members.present, partial(_present_cohort, cohort), seed)

    def roster_at(self, round: int) -> Roster:
        """The clients that have joined until this round."""
        return self.roster.first(self.members.count(round))

    def at_start_of(self, round: int, state: RunState) -> RunState:
        """The state when a round begins: if clients have joined, means over all clients change."""
        before, now = self.members.count(max(1, round - 1)), self.members.count(round)
        if before == now:
            return state
        theta, server = self.server.grown(state.theta, state.server, before, now)
        return replace(state, theta=theta, server=server)

    def __repr__(self) -> str:
        facts = {"agreement": self.agreement, "roster": self.roster, "cohort": self.cohort, "weighting": self.weighting}
        return summary("Coordinator", facts)

    @property
    def server(self) -> Server:
        return self.agreement.server

    def _check_settings(self) -> None:
        """Refuse what makes no sense together."""
        agreement, method = self.agreement, self.server.method
        beside = (*method.tracked, *method.numbers)
        setup = Setup(
            agreement.model,
            agreement.example,
            agreement.work,
            self.roster.sizes,
            self.weighting,
            agreement.uplink.exact and (agreement.bound is None or not agreement.bound.clips),
            self.server.ensembles.resets,
        )
        require(
            agreement.bound is None or not beside,
            f"faults.max_norm bounds delta alone, but {type(method).__name__} also sends {', '.join(beside)}; "
            "leave max_norm out, or use another method.",
        )
        optimizer = agreement.work.optimizer
        require(
            optimizer.plain or not method.sgd_only,
            f"local.optimizer is {type(optimizer).__name__.lower()}, but method {type(method).__name__.lower()} needs "
            f"the steps of SGD: {method.sgd_only}; set local.optimizer to sgd.",
        )
        method.check(setup)
        method.objective.check(setup)
        self.server.check_names(agreement.start)

    def _network(self, downlink: Downlink, clock: Clock | None) -> Network:
        agreement, theta = self.agreement, self.agreement.start
        devices = None
        if clock is not None:  # names of a million clients are made only if a trace needs them
            names = self.roster.names if clock.trace else range(len(self.roster))
            devices = clock.devices(names, generator(agreement.seed, "clock"))
        part, server = agreement.sent_part, self.server.start(theta)
        sent = {"theta": theta[part], **{name: server[name] for name in self.downlink}}
        full = sizes(sent) if self.server.method.federated else {}
        return Network(downlink, devices, len(self.roster), agreement.seed, full, part, self.select)

    def start(self, storage: Storage | None = None) -> RunState:
        """The state before the first round."""
        theta = self.agreement.start.clone()
        states = ClientStates(Store(storage or Storage()))
        return RunState(0, theta, self.server.start(theta), states, links=self.network.start())

    def fits(self, state: RunState) -> bool:
        """True if a state is one of this model and method."""
        theta = self.agreement.start
        kept = self.agreement.client_state(theta).keys()
        some = next(iter(state.clients.values()), None)
        return (
            state.theta.shape == theta.shape
            and self.server.start(theta).keys() <= state.server.keys()
            and self.network.fits(state.links)
            and (not some or kept <= some.keys())
        )


def _present_cohort(cohort: int | float | None, present: int) -> int:
    """The cohort among the clients that are present: a share of them, or at most all of them."""
    fewer = isinstance(cohort, Integral) and cohort > present
    return present if fewer else _cohort_size(cohort, present)


def _cohort_size(cohort: int | float | None, clients: int) -> int:
    if cohort is None:
        return clients
    if isinstance(cohort, Integral) and not isinstance(cohort, bool):
        require(cohort >= 1, f"cohort must be at least 1, not {cohort}.")
        require(cohort <= clients, f"cohort is {cohort}, but there are only {clients} clients.")
        return int(cohort)
    is_number = isinstance(cohort, Real) and not isinstance(cohort, bool)
    require(is_number and 0 < cohort <= 1, f"cohort must be in (0, 1] as a share of the clients, not {cohort!r}.")
    return max(1, round(float(cohort) * clients))
