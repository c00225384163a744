"""Covering cohorts, uniform among all of them: by rejection, and where that finds none by a Metropolis chain."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedadc.data.dataset import Array
from fedadc.selections.reports import KnownLabels, missing

FIRST, GROWTH = 64, 4  # cohorts that are drawn at once: few where most cover, then more
CELLS = 2**19  # numbers that are looked at at once: what a core's cache holds
LOOP = 256  # larger cohorts are drawn one by one: comparing each member with each would take longer
BLOCK = 256  # steps whose random numbers are drawn at once
COLDER = 0.5  # added to beta after a look that found nothing; steps double


def cohorts_of(clients: int, size: int, rows: int, rng: np.random.Generator) -> Array:
    """So many independent cohorts, [size, rows], each uniform among all (Floyd's algorithm for all rows at once)."""
    if size > LOOP:
        return np.stack([rng.choice(clients, size, replace=False, shuffle=False) for _ in range(rows)], axis=1)
    cohorts = np.empty((size, rows), dtype=np.int64)
    for j, last in enumerate(range(clients - size, clients)):
        drawn = rng.integers(last + 1, size=rows)
        drawn[(cohorts[:j] == drawn).any(axis=0)] = last
        cohorts[j] = drawn
    return cohorts


def by_rejection(known: KnownLabels, size: int, draws: int, rng: np.random.Generator) -> Array | None:
    """The first of so many uniform cohorts that lacks nothing."""
    rows, largest = FIRST, max(1, CELLS // (size * known.cells))
    while draws > 0:
        rows = min(rows, largest, draws)
        cohorts = cohorts_of(known.clients, size, rows, rng)
        covering = ~known.lacking(cohorts).any(axis=1)
        if covering.any():
            return cohorts[:, covering.argmax()]
        draws, rows = draws - rows, rows * GROWTH
    return None


def acceptance(before: Array, after: Array, beta: float) -> Array:
    """With what probability a swap is made, by the classes missing before and after it.

    Swaps are proposed as often as their reverse, so a cohort's weight in the long run is exp(-beta * missing): covering
    cohorts are all alike.
    """
    return np.asarray(np.exp(-beta * np.maximum(after - before, 0)))


def swapped(cohorts: Array, places: Array, newcomers: Array) -> tuple[Array, Array]:
    """Each cohort with a newcomer at a place, and whether that is a cohort: the newcomer was not in it already."""
    proposed = cohorts.copy()
    proposed[places, np.arange(len(places))] = newcomers
    return proposed, ~(cohorts == newcomers).any(axis=0)


def looks(
    known: KnownLabels, size: int, chains: int, steps: int, beta: float, times: int, rng: np.random.Generator
) -> Iterator[tuple[Array, Array]]:
    """Cohorts [size, chains] after fixed numbers of steps, and how many classes each lacks.

    Weak weights mix soon and strong ones find more. Given that it covers, a chain's state is uniform for any beta: so
    each look may be at a stronger one, after twice as many steps. "The first covering state" would not be uniform.
    """
    cohorts = cohorts_of(known.clients, size, chains, rng)
    lacks = missing(known.lacking(cohorts))
    for look in range(times):
        for places, newcomers, dice in _randomness(known.clients, size, chains, steps << look, rng):
            proposed, allowed = swapped(cohorts, places, newcomers)
            would_lack = missing(known.lacking(proposed))
            made = allowed & (dice < acceptance(lacks, would_lack, beta + COLDER * look))
            cohorts, lacks = np.where(made, proposed, cohorts), np.where(made, would_lack, lacks)
        yield cohorts, lacks


def by_chain(
    known: KnownLabels, size: int, chains: int, steps: int, beta: float, times: int, rng: np.random.Generator
) -> Array | None:
    """At the first look that has one, the covering cohort of the first chain."""
    for cohorts, lacks in looks(known, size, chains, steps, beta, times, rng):
        if (lacks == 0).any():
            return cohorts[:, (lacks == 0).argmax()]
    return None


def _randomness(
    clients: int, size: int, chains: int, steps: int, rng: np.random.Generator
) -> Iterator[tuple[Array, Array, Array]]:
    """For each step of each chain: a place, a newcomer and a number of [0, 1)."""
    for begun in range(0, steps, BLOCK):
        shape = (min(BLOCK, steps - begun), chains)
        yield from zip(
            rng.integers(size, size=shape), rng.integers(clients, size=shape), rng.random(shape), strict=True
        )
