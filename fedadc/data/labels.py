"""Whether labels can be classes. Numbers with many values and labels that never repeat rarely are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedadc.errors import DataError, require

FEW_NUMBERS = 20  # different numbers that may be classes, whatever they are
DENSE = 0.9  # share of the numbers up to the largest one that must occur in a list of class numbers
WRITTEN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def require_classes(labels: Sequence[str], rows: int, where: str, task: str | None = None) -> None:
    """Refuse different labels that are no classes; `rows`: how many rows have them (0: unknown).

    Class numbers count from 0 or 1 (0, 1, ..., 99), so many of them are fine; other numbers are probably quantities.
    `task="classification"` says that the labels are classes.
    """
    many = len(labels)
    require(
        task == "classification" or not many > FEW_NUMBERS or many < rows or rows == 0,
        f"{where}: each of the {rows:,} rows has another label, so no class can be learned; name the column of the "
        "labels (this one seems to identify rows), or set task: regression if it is a number to predict.",
        DataError,
    )
    if task == "classification" or not all(WRITTEN_NUMBER.fullmatch(label) for label in labels):
        return
    fractions = [label for label in labels if float(label) != int(float(label))]
    advice = "set task: regression to predict the number, or task: classification to make every number a class"
    require(
        not fractions,
        f"{where}: the label {fractions[0] if fractions else ''} is a number with decimals; {advice}.",
        DataError,
    )
    numbers = [int(float(label)) for label in labels]
    counted = min(numbers) >= 0 and many >= DENSE * max(numbers)
    require(
        many <= FEW_NUMBERS or counted,
        f"{where}: the label is a number with {many:,} values from {min(numbers)} to {max(numbers)}; {advice}.",
        DataError,
    )
