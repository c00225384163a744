"""Client selection by covering: the local data of a cohort together contain every class (section IV-E)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from fedadc.data.dataset import Array
from fedadc.errors import FedadcError, require
from fedadc.selections.base import Chooser, Selection
from fedadc.selections.existence import cover_exists, why_none
from fedadc.selections.reports import KnownLabels, ReportedClasses, ReportedCounts, Reports
from fedadc.selections.sampling import by_chain, by_rejection

NO_COVER_ADVICE = "use a larger cohort or selection uniform"
UNPROVEN = "which does not prove that none exists"
PROPOSALS_PER_CLIENT, PROPOSALS_PER_SLOT, MAX_STEPS = 5, 100, 20_000  # these give the default of `steps`


@dataclass(frozen=True, kw_only=True)
class Covering(Selection):
    """A cohort whose clients together hold every class, uniform among all such cohorts (section IV-E)."""

    needs_label_counts: ClassVar[bool] = True

    reports: Reports = "histograms"  # clients report their samples per class, or only which classes they hold
    at_least: int = 1  # samples of each class that a cohort must hold in total
    draws: int = 1_000_000  # uniform cohorts to try before the Markov chains
    chains: int = 64  # parallel Markov chains
    steps: int | None = field(default=None, metadata={"default": "from clients and cohort"})  # until the first look
    beta: float = 2.0  # until the first look, every missing class multiplies a cohort's weight by exp(-beta)
    looks: int = 5  # how often the chains are inspected; each time beta is larger and the steps are doubled

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least, most in (
            ("at_least", 1, 2**31 - 1),
            ("draws", 0, 10**12),
            ("chains", 1, 10**6),
            ("looks", 0, 16),
        ):
            value = getattr(self, name)
            require(least <= value <= most, f"{name} must be in {least}..{most}, not {value}.")
        require(
            self.steps is None or 1 <= self.steps <= 10**9,
            f"steps must be in 1..10^9, not {self.steps}.",
        )
        require(0 < self.beta < math.inf, f"beta must be positive and finite, not {self.beta}.")
        require(
            self.draws + self.looks > 0,
            "draws and looks are both 0; at least one must be positive.",
        )
        require(
            self.at_least == 1 or self.reports == "histograms",
            f"at_least {self.at_least} needs reports: histograms; classes has no sample counts.",
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
        if reason is not None:
            needed = "all classes" if self.at_least == 1 else f"{self.at_least} samples of every class"
            advice = "use selection uniform" if reason.startswith("no client") else NO_COVER_ADVICE
            raise FedadcError(f"no cohort of {size} clients holds {needed}: {reason}; {advice}.")
        if self.at_least == 1:
            return partial(_choose, self, held, size, "although one exists" if exists else UNPROVEN)
        return partial(_choose, self, ReportedCounts.of(counts, self.at_least), size, UNPROVEN)

    def steps_of(self, clients: int, size: int) -> int:
        """The steps of each chain until the first look.

        By default, every client is proposed several times, and every slot of the cohort gets many proposals.
        """
        return self.steps or min(max(PROPOSALS_PER_CLIENT * clients, PROPOSALS_PER_SLOT * size), MAX_STEPS)


def _choose(rule: Covering, labels: KnownLabels, size: int, existence: str, rng: np.random.Generator) -> Array:
    """A covering cohort. `existence` says in the error message whether one is known to exist."""
    cohort = by_rejection(labels, size, rule.draws, rng)
    if cohort is None:
        steps = rule.steps_of(labels.clients, size)
        cohort = by_chain(labels, size, rule.chains, steps, rule.beta, rule.looks, rng)
    if cohort is None:
        tries = rule.draws + rule.chains * rule.looks
        raise FedadcError(
            f"selection covering: no cohort of {size} clients with every class (samples of each: {rule.at_least} or "
            f"more) was found in {tries} tries, {existence}; {NO_COVER_ADVICE}."
        )
    return cohort
