"""The settings of a table: how it is read, scaled and encoded, the same for files, DataFrames and sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from fedadc.data.spelling import DEFAULT_SPELLING, Spelling
from fedadc.errors import require
from fedadc.tasks import require_task

Scale = Literal["standard", "per-client", "none"] | Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class TableRules:
    """The settings of a table: they are the same for files, DataFrames and sites."""

    scale: Scale = "standard"
    categories: tuple[str, ...] = ()  # columns of numbers that are categories
    spelling: Spelling = DEFAULT_SPELLING
    task: str | None = None  # what the labels are; None: what they look like
    targets: tuple[str, ...] = ()  # in a regression, the label columns

    @staticmethod
    def of(
        scale: Any = "standard",
        categories: Sequence[str] | None = None,
        missing: Sequence[str | float] | None = None,
        merge_names: bool = False,
        task: str | None = None,
        label: str | Sequence[str] = "",
    ) -> TableRules:
        """The rules from the settings of a data set."""
        require_task(task)
        kinds = ("standard", "per-client", "none")
        wanted = "scale must be standard, per-client, none or map columns to (center, spread)"
        require(scale is None or isinstance(scale, Mapping) or scale in kinds, f"{wanted}, not {scale!r:.60}.")
        for name, constants in scale.items() if isinstance(scale, Mapping) else ():
            require(
                are_constants(constants),
                f"scale.{name} must be [center, spread] with a spread above 0, not {constants!r:.60}.",
            )
        for name, values in (("categories", categories), ("missing", missing)):
            require(not isinstance(values, str), f"{name} must be a list, not {values!r:.60}.")
        spelling = Spelling(merge_names=merge_names)
        if missing is not None:
            spelling = Spelling(tuple(missing), merge_names)
        targets = [label] if isinstance(label, str) else [*label]
        require(bool(targets) and len({*targets}) == len(targets), f"label must name different columns, not {targets}.")
        require(
            task == "regression" or len(targets) == 1,
            f"label names {len(targets)} columns; several numbers to predict are for task: regression.",
        )
        return TableRules(
            "none" if scale is None else scale, tuple(categories or ()), spelling, task,
            tuple(targets) if task == "regression" else (),
        )  # fmt: skip

    @property
    def constants(self) -> Mapping[str, Sequence[float]]:
        """The given centers and spreads, by column."""
        return self.scale if isinstance(self.scale, Mapping) else {}

    @property
    def sums(self) -> bool:
        """Whether clients must tell the sums of their numbers."""
        return self.scale == "standard"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are named."""
        return (*self.constants, *self.categories)


def are_constants(values: Any) -> bool:
    """Whether these are a center and a spread."""
    numbers = isinstance(values, list | tuple) and all(isinstance(v, int | float) and isfinite(v) for v in values)
    return numbers and len(values) == 2 and values[1] > 0
