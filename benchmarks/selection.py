"""What covering cohorts cost: `python benchmarks/selection.py` draws some for each kind of federation; five minutes.

A client's labels are so many draws from its own Dirichlet(0.1) shares of 100 classes. Then cohorts by the chains are
compared with cohorts by rejection, where both are possible: how often each client is in one (chi-square of two samples
over its degrees of freedom: 1 if they agree).
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cache

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedadc.data.dataset import Array
from fedadc.errors import FedadcError
from fedadc.federation.selection import Clusters, Covering
from fedadc.federation.selection.reports import Classes
from fedadc.federation.selection.sampling import by_rejection, cohorts_of, looks
from fedadc.rng import generator

CLASSES, DRAWS, COHORTS = 100, 1_000_000, 10
CASES = [  # clients, samples of each on average, cohort
    *((1000, 50, size) for size in (12, 10, 9, 8, 7, 6)),
    *((1000, 125, size) for size in (10, 8, 7)),
    *((1_000_000, 50, size) for size in (10, 8)),
]


@cache
def label_counts(clients: int, samples: int) -> Array:
    rng, counts = generator(0, "labels"), np.empty((clients, CLASSES), dtype=np.int32)
    for begun in range(0, clients, 1000):
        shares = rng.dirichlet(np.full(CLASSES, 0.1), size=1000)
        counts[begun : begun + 1000] = rng.multinomial(samples, shares)
    return counts


def acceptance(known: Classes, size: int) -> float:
    """The share of uniform cohorts that cover."""
    rng, rows = generator(0, "benchmark"), 2**14
    found = sum(
        int((~known.lacking(cohorts_of(known.clients, size, rows, rng)).any(axis=1)).sum())
        for _ in range(DRAWS // rows)
    )
    return found / (DRAWS // rows * rows)


def row(clients: int, samples: int, size: int) -> list[str]:
    counts = label_counts(clients, samples)
    began = time.perf_counter()
    choose = Covering().chooser(clients, size, lambda: counts, generator(0, "selection"))
    prepared, seconds, found = time.perf_counter() - began, [], 0
    for t in range(COHORTS):
        began = time.perf_counter()
        with suppress(FedadcError):
            found += bool((counts[choose(generator(0, "cohort", t))] > 0).any(axis=0).all())
        seconds.append(time.perf_counter() - began)
    share = acceptance(Classes.of(counts > 0), size)
    return [
        f"{clients:,}", str(samples), str(size), f"{share:.1e}" if share else f"< {1 / DRAWS:.0e}", f"{prepared:.2f}",
        f"{np.median(seconds):.4f}", f"{max(seconds):.2f}", f"{found} of {COHORTS}",
    ]  # fmt: skip


def agreement(size: int, wanted: int = 2000) -> list[str]:
    """At each look, of chains and rejection with as many cohorts each."""
    known, rule = Classes.of(label_counts(1000, 50) > 0), Covering()
    rng = generator(0, "rejection")
    rejected = [by_rejection(known, size, 10**9, rng) for _ in range(wanted)]
    often = np.bincount(np.concatenate([c for c in rejected if c is not None]), minlength=1000)
    ratios = []
    for cohorts, lacks in looks(known, size, 4000, rule.steps_of(1000, size), rule.beta, 2, generator(0, "chains")):
        states = cohorts[:, lacks == 0][:, :wanted]
        times = np.bincount(states.ravel(), minlength=1000)
        scale = np.sqrt(often.sum() / times.sum())
        squares = (times * scale - often / scale) ** 2 / np.maximum(times + often, 1)
        ratios.append(f"{squares.sum() / 999:.2f} ({(lacks == 0).mean():.0%} cover)")
    return [str(size), *ratios]


def main() -> None:
    table = Table(
        "clients", "samples each", "cohort", "uniform cohorts that cover", "start, s", "median s", "longest s", "found"
    )
    for case in track(CASES, "covering cohorts"):
        table.add_row(*row(*case))
    Console().print(table)
    table = Table("cohort", "first look", "second")
    for size in track((12, 11, 10), "chains against rejection"):
        table.add_row(*agreement(size))
    Console().print(table)
    counts = label_counts(1_000_000, 50)
    began = time.perf_counter()
    choose = Clusters().chooser(len(counts), 10, lambda: counts, generator(0, "selection"))
    middle = time.perf_counter()
    choose(generator(0, "cohort", 1))
    Console().print(
        f"clusters of a million: start {middle - began:.1f} s, a cohort {time.perf_counter() - middle:.4f} s"
    )


if __name__ == "__main__":
    main()
