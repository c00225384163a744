"""Sample uniformly among all covering cohorts: by rejection, and if that finds none, by Metropolis chains."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedadc.data.dataset import Array
from fedadc.selections.reports import KnownLabels, missing

FIRST_DRAWS, GROWTH = 64, 4  # cohorts drawn at once: few at first, because often most of them cover
EXAMINED_AT_ONCE = 2**19  # numbers examined at once, so that they fit into the cache of a core
MAX_VECTORIZED = 256  # larger cohorts are drawn one by one: comparing all pairs of members would take longer
STEPS_AT_ONCE = 256  # steps whose random numbers are drawn at once
BETA_INCREASE = 0.5  # added to beta after a look without a covering cohort


def cohorts_of(clients: int, size: int, rows: int, rng: np.random.Generator) -> Array:
    """Independent uniform cohorts, [size, rows], by Floyd's algorithm, vectorized over the rows."""
    if size > MAX_VECTORIZED:
        return np.stack([rng.choice(clients, size, replace=False, shuffle=False) for _ in range(rows)], axis=1)
    cohorts = np.empty((size, rows), dtype=np.int64)
    for j, last in enumerate(range(clients - size, clients)):
        drawn = rng.integers(last + 1, size=rows)
        drawn[(cohorts[:j] == drawn).any(axis=0)] = last
        cohorts[j] = drawn
    return cohorts


def by_rejection(labels: KnownLabels, size: int, draws: int, rng: np.random.Generator) -> Array | None:
    """The first covering cohort among `draws` uniform cohorts; None if there is none."""
    rows, max_rows = FIRST_DRAWS, max(1, EXAMINED_AT_ONCE // (size * labels.cells))
    while draws > 0:
        rows = min(rows, max_rows, draws)
        cohorts = cohorts_of(labels.clients, size, rows, rng)
        covering = ~labels.lacking(cohorts).any(axis=1)
        if covering.any():
            return cohorts[:, covering.argmax()]
        draws, rows = draws - rows, rows * GROWTH
    return None


def acceptance(before: Array, after: Array, beta: float) -> Array:
    """The acceptance probability of a swap, from the number of classes missing before and after it.

    A swap and its reverse are equally likely to be proposed. So the stationary weight of a cohort is
    exp(-beta * missing), which is the same for all covering cohorts.
    """
    return np.asarray(np.exp(-beta * np.maximum(after - before, 0)))


def swapped(cohorts: Array, slots: Array, newcomers: Array) -> tuple[Array, Array]:
    """Each cohort with one slot given to a newcomer, and whether this is valid: the newcomer was not a member yet."""
    proposed = cohorts.copy()
    proposed[slots, np.arange(len(slots))] = newcomers
    return proposed, ~(cohorts == newcomers).any(axis=0)


def looks(
    labels: KnownLabels, size: int, chains: int, steps: int, beta: float, count: int, rng: np.random.Generator
) -> Iterator[tuple[Array, Array]]:
    """The cohorts [size, chains] of Metropolis chains at `count` looks, and how many classes each cohort lacks.

    A small beta mixes faster, and a large beta finds covering cohorts more often. Given that the state of a chain
    covers, it is uniform for any beta. So each look may use a larger beta, after twice as many steps. The number of
    steps until a look is fixed, because stopping at the first covering state would not be uniform.
    """
    cohorts = cohorts_of(labels.clients, size, chains, rng)
    lacks = missing(labels.lacking(cohorts))
    for look in range(count):
        for slots, newcomers, uniform in _random_steps(labels.clients, size, chains, steps << look, rng):
            proposed, valid = swapped(cohorts, slots, newcomers)
            would_lack = missing(labels.lacking(proposed))
            accepted = valid & (uniform < acceptance(lacks, would_lack, beta + BETA_INCREASE * look))
            cohorts, lacks = np.where(accepted, proposed, cohorts), np.where(accepted, would_lack, lacks)
        yield cohorts, lacks


def by_chain(
    labels: KnownLabels, size: int, chains: int, steps: int, beta: float, count: int, rng: np.random.Generator
) -> Array | None:
    """The covering cohort of the first chain that has one, at the first look with any; None after `count` looks."""
    for cohorts, lacks in looks(labels, size, chains, steps, beta, count, rng):
        if (lacks == 0).any():
            return cohorts[:, (lacks == 0).argmax()]
    return None


def _random_steps(
    clients: int, size: int, chains: int, steps: int, rng: np.random.Generator
) -> Iterator[tuple[Array, Array, Array]]:
    """For each step, per chain: a slot of the cohort, a newcomer and a uniform number in [0, 1)."""
    for start in range(0, steps, STEPS_AT_ONCE):
        shape = (min(STEPS_AT_ONCE, steps - start), chains)
        yield from zip(
            rng.integers(size, size=shape), rng.integers(clients, size=shape), rng.random(shape), strict=True
        )
