"""Whether a covering cohort exists: yes, no (with the reason), or unknown."""

from __future__ import annotations

import numpy as np

from fedadc.data.dataset import Array
from fedadc.selections.reports import ReportedClasses, ones

ROWS = 20_000_000  # clients looked at before a search gives up: about a second
FEW = 2000  # distinct class sets among which those are dropped that another contains


def why_none(counts: Array, size: int, at_least: int) -> str | None:
    """Why no `size` clients can hold `at_least` samples of each class, from [clients, classes]; None: they may."""
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
            return (
                f"the {size} clients with most of them hold {most} at best, not {at_least} of each of {classes} classes"
            )
    most = int(np.sort((counts > 0).sum(axis=1))[clients - size :].sum())
    return None if most >= classes else f"the {size} clients with most classes hold {most} at best, not {classes}"


def cover_exists(known: ReportedClasses, classes: int, size: int, budget: int = ROWS) -> bool | None:
    """Depth first over the holders of the rarest missing class, the most useful first; None: the budget ran out."""
    all_classes = ReportedClasses.of(np.zeros((1, classes), dtype=bool)).lacks[0]
    sets = _maximal(np.unique(all_classes & ~known.lacks, axis=0))
    each = np.unpackbits(sets.view(np.uint8), axis=1)  # [sets, bits]
    holders = each.sum(axis=0, dtype=np.int64)
    branches = [iter(all_classes[None])]  # by the number of chosen sets: the classes that would still be missing
    while branches:
        wanted = next(branches[-1], None)
        if wanted is None:
            branches.pop()
            continue
        budget -= len(sets)
        if budget < 0:
            return None
        gains, missing, places = ones(sets & wanted), int(ones(wanted)), size + 1 - len(branches)
        if gains.max() == missing:
            return True
        if places == 1 or np.partition(gains, -min(places, len(sets)))[-places:].sum() < missing:
            continue
        bits = np.flatnonzero(np.unpackbits(wanted.view(np.uint8)))
        able = np.flatnonzero(each[:, bits[holders[bits].argmin()]])
        branches.append(iter(wanted & ~sets[able[np.argsort(-gains[able], kind="stable")]]))
    return False


def _maximal(sets: Array) -> Array:
    """Without those that another contains: whoever covers with one of these also does with that other."""
    if len(sets) > FEW:
        return sets
    containing = np.array([((sets & s) == s).all(axis=1).sum() for s in sets])
    return np.asarray(sets[containing == 1])  # each contains itself
