"""Decide whether a covering cohort exists: yes, no (with the reason), or unknown."""

from __future__ import annotations

import numpy as np

from fedadc.data.dataset import Array
from fedadc.selections.reports import ReportedClasses, ones

BUDGET = 20_000_000  # class sets examined before the search gives up, after about a second
MAX_SETS = 2000  # up to this many distinct class sets, those contained in another one are removed first


def why_none(counts: Array, size: int, at_least: int) -> str | None:
    """Why no `size` clients hold `at_least` samples of each class; None if no simple count rules it out."""
    clients, classes = counts.shape
    if not (held := counts.any(axis=0)).all():
        return f"no client holds class {held.argmin()}"
    for c in range(classes if at_least > 1 else 0):
        most = int(np.partition(counts[:, c], clients - size)[clients - size :].sum())
        if most < at_least:
            return f"they hold at most {most} samples of class {c}, not {at_least}"
    if at_least > 1:
        most = int(np.sort(np.minimum(counts, at_least).sum(axis=1))[clients - size :].sum())
        if most < at_least * classes:
            return f"{size} clients hold at most {most} usable samples, not {at_least} of each of {classes} classes"
    most = int(np.sort((counts > 0).sum(axis=1))[clients - size :].sum())
    return None if most >= classes else f"the {size} clients with the most classes hold at most {most}, not {classes}"


def cover_exists(reported: ReportedClasses, classes: int, size: int, budget: int = BUDGET) -> bool | None:
    """True if `size` clients that together hold every class exist; None if the budget ran out.

    A depth-first search: branch over the class sets that contain the rarest missing class, the most useful first.
    """
    all_classes = ReportedClasses.of(np.zeros((1, classes), dtype=bool)).lacks[0]
    sets = _maximal(np.unique(all_classes & ~reported.lacks, axis=0))
    bits_of_sets = np.unpackbits(sets.view(np.uint8), axis=1)  # [sets, bits]
    holders = bits_of_sets.sum(axis=0, dtype=np.int64)
    branches = [iter(all_classes[None])]  # per number of chosen sets: the alternatives, as the classes still missing
    while branches:
        missing = next(branches[-1], None)
        if missing is None:
            branches.pop()
            continue
        budget -= len(sets)
        if budget < 0:
            return None
        gains, count, slots = ones(sets & missing), int(ones(missing)), size + 1 - len(branches)
        if gains.max() == count:
            return True
        if slots == 1 or np.partition(gains, -min(slots, len(sets)))[-slots:].sum() < count:
            continue
        bits = np.flatnonzero(np.unpackbits(missing.view(np.uint8)))
        candidates = np.flatnonzero(bits_of_sets[:, bits[holders[bits].argmin()]])
        candidates = candidates[np.argsort(-gains[candidates], kind="stable")]
        branches.append(iter(missing & ~sets[candidates]))
    return False


def _maximal(sets: Array) -> Array:
    """The sets that no other set contains. A cover that uses a contained set can use the larger one instead."""
    if len(sets) > MAX_SETS:
        return sets
    containing = np.array([((sets & s) == s).all(axis=1).sum() for s in sets])
    return np.asarray(sets[containing == 1])  # every set contains itself
