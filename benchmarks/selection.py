"""What covering cohorts cost: `python benchmarks/selection.py` draws some for each kind of federation; five minutes.

Clients hold Dirichlet(0.1) shares of 100 classes. Then cohorts by the chains are compared with cohorts by rejection,
where both are possible: how often each client is in one (chi-square of two samples over its degrees of freedom: 1 if
they agree). Seconds are of processor time, so that others on the machine do not count.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cache

import numpy as np
import torch

from fedadc.data.dataset import Array
from fedadc.errors import FedadcError
from fedadc.partitions import Dirichlet, partition
from fedadc.rng import generator
from fedadc.selections import Clusters, Covering
from fedadc.selections.reports import ReportedClasses
from fedadc.selections.sampling import by_rejection, cohorts_of, looks

CLASSES, DRAWS, COHORTS = 100, 1_000_000, 10
CASES = [  # clients, samples of each on average, cohort
    *((1000, 50, size) for size in (12, 10, 9, 8, 7)),
    (1000, 100, 10),
    *((1000, 250, size) for size in (10, 7)),
    (1_000_000, 50, 14),
]


@cache
def label_counts(clients: int, samples: int) -> Array:
    """By the package's own partition; of a million clients, which would take minutes, by draws from their shares."""
    if clients <= 1000:
        labels = np.repeat(np.arange(CLASSES), clients * samples // CLASSES)
        held = partition(Dirichlet(alpha=0.1), labels, CLASSES, clients, generator(0, "partition"))
        return held.class_counts(torch.from_numpy(labels), CLASSES)
    rng, counts = generator(0, "labels"), np.empty((clients, CLASSES), dtype=np.int32)
    for begun in range(0, clients, 1000):
        counts[begun : begun + 1000] = rng.multinomial(samples, rng.dirichlet(np.full(CLASSES, 0.1), size=1000))
    return counts


def acceptance(known: ReportedClasses, size: int) -> float:
    """The share of uniform cohorts that cover."""
    rng, rows = generator(0, "benchmark"), 2**14
    found = sum(
        int((~known.lacking(cohorts_of(known.clients, size, rows, rng)).any(axis=1)).sum())
        for _ in range(DRAWS // rows)
    )
    return found / (DRAWS // rows * rows)


def row(clients: int, samples: int, size: int) -> list[str]:
    counts = label_counts(clients, samples)
    began = time.process_time()
    choose = Covering().chooser(clients, size, lambda: counts, generator(0, "selection"))
    prepared, seconds, found = time.process_time() - began, [], 0
    for t in range(COHORTS):
        began = time.process_time()
        with suppress(FedadcError):
            found += bool((counts[choose(generator(0, "cohort", t))] > 0).any(axis=0).all())
        seconds.append(time.process_time() - began)
    share = acceptance(ReportedClasses.of(counts > 0), size)
    return [
        f"{clients:,}", str(samples), str(size), f"{share:.1e}" if share else f"< {1 / DRAWS:.0e}", f"{prepared:.2f}",
        f"{np.median(seconds):.4f}", f"{max(seconds):.2f}", f"{found} of {COHORTS}",
    ]  # fmt: skip


def agreement(size: int, wanted: int = 1000) -> list[str]:
    """At each look, of chains and rejection with as many cohorts each."""
    known, rule = ReportedClasses.of(label_counts(1000, 50) > 0), Covering()
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


def show(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


def main() -> None:
    """Tables in Markdown, row by row."""
    show(
        "clients", "samples each", "cohort", "uniform cohorts that cover", "start, s", "median s", "longest s", "found"
    )
    for case in CASES:
        show(*row(*case))
    show("cohort", "first look", "second look")
    for size in (12, 11):
        show(*agreement(size))
    counts = label_counts(1_000_000, 50)
    began = time.process_time()
    choose = Clusters().chooser(len(counts), 10, lambda: counts, generator(0, "selection"))
    middle = time.process_time()
    choose(generator(0, "cohort", 1))
    show("clusters of a million", f"start {middle - began:.1f} s", f"cohort {time.process_time() - middle:.4f} s")


if __name__ == "__main__":
    main()
