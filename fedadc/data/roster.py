"""What a server knows about its clients before training: names, sizes and, if reported, label counts; no sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedadc.data.dataset import Array
from fedadc.data.spelling import number
from fedadc.errors import FedadcError, require, unknown


@dataclass(frozen=True)
class Roster:
    """The clients of a federation, in the order of their numbers 0, 1, ..."""

    sizes: Array  # int64 [clients], the number of training samples of every client
    given_names: Sequence[str] | Array | None = None  # None: their numbers are their names
    reported: Callable[[], Array] | None = None  # samples per client and class, [clients, classes]; None: not reported
    sizes_known: bool = True  # False: some clients do not tell their size, and `sizes` has a stand-in for it

    def __post_init__(self) -> None:
        sizes = np.asarray(self.sizes, dtype=np.int64)
        require(sizes.ndim == 1 and len(sizes) > 0, "sizes must have the number of samples of at least one client.")
        require(sizes.min() >= 1, f"sizes must be at least 1, not {sizes.min()}.")
        object.__setattr__(self, "sizes", sizes)
        names = self.given_names
        distinct = names is None or (len(names) == len(sizes) == len(np.unique(names)))
        require(distinct, f"given_names must have {len(sizes)} different names, one for each client.")

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        counts = "with" if self.reported else "without"
        return f"Roster({len(self)} clients, {int(self.sizes.sum())} training samples, {counts} label counts)"

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, range(len(self)) if self.given_names is None else self.given_names))

    @cached_property
    def mean_samples(self) -> float:
        """The mean number of training samples over all clients; NaN: it is not known."""
        return float("nan") if not self.sizes_known else int(self.sizes.sum()) / len(self)

    def first(self, count: int) -> Roster:
        """The clients with the numbers below `count`."""
        if count == len(self):
            return self
        names = None if self.given_names is None else self.given_names[:count]
        reported = None if self.reported is None else lambda: self.label_counts()[:count]
        return Roster(self.sizes[:count], names, reported, self.sizes_known)

    def label_counts(self) -> Array:
        if self.reported is None:
            raise FedadcError("this selection needs label counts, which the clients do not report; use uniform.")
        return self.reported()


def are_numbered(names: Sequence[str]) -> bool:
    """Whether a client's number is its place among the names: some name may be a number, and means another client."""
    places = all(name == str(place) for place, name in enumerate(names))
    return places or not any(number(name) == number(name) for name in names)


def client_place(client: int | str, names: Sequence[str]) -> int:
    """The place of a client among the names, from its name or, if no name is a number, from its number."""
    text = str(client).strip()
    if text in names:
        return names.index(text)
    if are_numbered(names) and text.isdecimal() and len(text) < 19 and int(text) < len(names):
        return int(text)
    raise unknown("client", text, names)
