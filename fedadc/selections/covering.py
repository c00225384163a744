"""Cohorts whose union of local data holds every class (section IV-E)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import FedadcError, require
from fedadc.selections.base import Chooser, Selection
from fedadc.selections.existence import cover_exists, why_none
from fedadc.selections.reports import KnownLabels, ReportedClasses, ReportedCounts, Reports
from fedadc.selections.sampling import by_chain, by_rejection

ADVICE = "raise cohort.size or use selection uniform"
UNPROVEN = "which does not prove that there is none"
OFFERS, PER_PLACE, LONGEST = 5, 100, 20_000  # steps: offers of each client, offers to each place; at most


@dataclass(frozen=True, kw_only=True)
class Covering(Selection):
    """A cohort whose union holds every class, uniform among all such cohorts (section IV-E)."""

    reports: Reports = "histograms"  # what clients tell the server: samples of each class, or only which they hold
    at_least: int = 1  # samples of each class in the union
    draws: int = 1_000_000  # of uniform cohorts, before the chains
    chains: int = 64
    steps: int | None = field(default=None, metadata={"default": "from clients and cohort"})  # to the first look
    beta: float = 2.0  # at the first look, exp(-beta) is the weight of a missing class
    looks: int = 5  # each at a larger beta, after twice as many steps

    def __post_init__(self) -> None:
        require(
            self.reports in ("histograms", "classes"),
            f"selection covering: reports is histograms or classes, not {self.reports!r}.",
        )
        for name, least, most in (
            ("at_least", 1, 2**31 - 1),
            ("draws", 0, 10**12),
            ("chains", 1, 10**6),
            ("looks", 0, 16),
        ):
            value = getattr(self, name)
            require(least <= value <= most, f"selection covering: {name} must lie in {least}..{most}, not {value}.")
        require(
            self.steps is None or 1 <= self.steps <= 10**9,
            f"selection covering: steps must lie in 1..10^9, not {self.steps}.",
        )
        require(0 < self.beta < math.inf, f"selection covering: beta must be positive and finite, not {self.beta}.")
        require(self.draws + self.looks > 0, "selection covering: draws and looks are both 0, which tries nothing.")
        require(
            self.at_least == 1 or self.reports == "histograms",
            f"selection covering: at_least {self.at_least} needs reports: histograms, not which classes clients hold.",
        )

    def chooser(self, clients: int, size: int, label_counts: Callable[[], Array], rng: np.random.Generator) -> Chooser:
        counts = label_counts()
        if self.reports == "classes":
            counts = counts > 0
        classes, held = counts.shape[1], ReportedClasses.of(counts > 0)
        reason = why_none(counts, size, self.at_least)
        exists = None if reason else cover_exists(held, classes, size)
        if exists is False:
            reason = "a complete search found none"
        every = "all classes" if self.at_least == 1 else f"{self.at_least} samples of every class"
        advice = ADVICE if reason is None or not reason.startswith("no client") else "use selection uniform"
        require(reason is None, f"no cohort of {size} clients holds {every}: {reason}; {advice}.")
        if self.at_least == 1:
            return partial(_choose, self, held, size, "though there is one" if exists else UNPROVEN)
        return partial(_choose, self, ReportedCounts.of(counts, self.at_least), size, UNPROVEN)

    def steps_of(self, clients: int, size: int) -> int:
        """Every client is offered to a chain some times, and every place is offered some clients."""
        return self.steps or min(max(OFFERS * clients, PER_PLACE * size), LONGEST)


def _choose(rule: Covering, known: KnownLabels, size: int, doubt: str, rng: np.random.Generator) -> Array:
    cohort = by_rejection(known, size, rule.draws, rng)
    if cohort is None:
        steps = rule.steps_of(known.clients, size)
        cohort = by_chain(known, size, rule.chains, steps, rule.beta, rule.looks, rng)
    if cohort is None:
        tries = rule.draws + rule.chains * rule.looks
        raise FedadcError(
            f"selection covering: no cohort of {size} clients with every class (samples of each: {rule.at_least} or "
            f"more) was found in {tries} tries, {doubt}; {ADVICE}."
        )
    return cohort
