"""The labels of a table's rows: the class or the numbers of every row, and whether labels can be classes at all.

Numbers with many values and labels that never repeat rarely are classes.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Sequence

import numpy as np

from fedadc.data.columns import Array, Fields
from fedadc.data.spelling import Spelling, likeness, no_number
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


def class_numbers(
    labels: Fields, classes: Sequence[str], spelling: Spelling, column: str, where: str, first_row: int = 2
) -> Array:
    """The class of every row, int64, from its label in this column."""
    key: Callable[[str], str] = likeness if spelling.merge_names else str
    number = {key(name): i for i, name in enumerate(classes)}
    known = [number.get(key(word), -1) for word in labels.words]
    found: Array = np.array([*known, -1], dtype=np.int64)[labels.codes]
    if (found < 0).any():
        row = int((found < 0).argmax())
        if labels.codes[row] < 0:
            raise DataError(missing_name(where, row + first_row, column, "label"))
        shown = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        label = f"the label {reprlib.repr(labels.text(row))} does not occur in training"
        raise DataError(f"{where}, row {row + first_row}: {label}, whose labels are {shown}.")
    return found


def numbers_to_predict(
    fields: Callable[[str], Fields], columns: Sequence[str], where: str, first_row: int = 2
) -> Array:
    """The numbers to predict of every row, float64 [rows, columns]."""
    found = []
    for column in columns:
        labels = fields(column)
        stray = np.flatnonzero(np.isnan(labels.numbers)).tolist()
        if stray:
            row = stray[0]
            if labels.codes[row] < 0:
                raise DataError(missing_name(where, row + first_row, column, "label"))
            text = labels.text(row)
            raise DataError(
                f"{where}, row {row + first_row}, column {column}: the label {reprlib.repr(text)} is {no_number(text)}."
            )
        found.append(labels.numbers)
    return np.stack(found, axis=1)


def missing_name(where: str, row: int, column: str, what: str) -> str:
    """The sentence about a row without a label or a client."""
    return (
        f"{where}, row {row}, column {column}: the {what} is missing; complete or remove the row, or say with missing "
        "which spellings are missing values."
    )
