"""Remarks before harm: what is probably a mistake in data that can be trained on. They are notes of the data set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedadc.data.columns import Array, Fields
from fedadc.data.dataset import Dataset, Samples
from fedadc.data.spelling import as_yaml, likeness
from fedadc.data.summaries import ColumnSummary, TableSummary
from fedadc.rng import generator

LEAST_ROWS = 20  # of fewer rows, nothing is said
MANY_FEATURES = 100  # of one column
LONELY_SHOWN = 5  # names in a remark
ROWS_LOOKED_AT = 1000  # rows, before all of them are
REPEATED = 0.05  # share of test rows that are training rows, above which it is said
UNEQUAL = 20  # times the samples of the smallest client that the largest one has
HASHED_AT_ONCE = 1 << 16  # rows
# a decimal comma, a percentage, or a number with a unit behind a blank
QUANTITY = re.compile(r"[+-]?\d[\d.']*,\d+|[+-]?\d[\d.,']*\s*%|[+-]?\d[\d.,']*\s[^\W\d_]{1,5}(/[^\W\d_]{1,5})?")
DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([ T]\d{1,2}:\d{2}.*)?")


def about_columns(columns: Mapping[str, Fields], rows: Array, summary: TableSummary, used: Sequence[str]) -> list[str]:
    """Features of a table that look like identifiers, dates or free text in its training rows."""
    found = []
    for name in used:
        column, shown = summary.columns[name], as_yaml(name)
        words, instead = len(column.words), f"leave it out with drop: [{shown}]"
        if words > 2 and _most(QUANTITY, column.words):
            written = f"texts that look like numbers, such as {column.words[0]!r:.30}, which become {words} categories"
            found.append(f"{shown} has {written}: write them with a decimal point and without units")
        elif words > 2 and _most(DATE, column.words):
            found.append(f"{shown} has dates, which become {words} categories: write them as numbers, or {instead}")
        elif words == column.texts > LEAST_ROWS or (not words and _are_identifiers(columns[name], rows)):
            found.append(f"{shown} has another value in every row, as identifiers do: {instead}")
        elif words > MANY_FEATURES:
            found.append(f"{shown} becomes {words} features, one for each text: group the texts, or {instead}")
        elif alike := _alike(column.words):
            found.append(
                f"{shown} has {alike[0]!r:.30} and {alike[1]!r:.30}, which become two categories: write them alike"
            )
        elif summary.rows > LEAST_ROWS and _is_constant(column):
            found.append(f"{shown} is the same in all training rows, so nothing can be learned from it: {instead}")
    return found


def _alike(words: Sequence[str]) -> tuple[str, str] | None:
    """Two texts that differ only in case, blanks or leading zeros, if there are such."""
    first: dict[str, str] = {}
    for word in words:
        other = first.setdefault(likeness(word), word)
        if other != word:
            return other, word
    return None


def _most(pattern: re.Pattern[str], words: Sequence[str]) -> bool:
    """Whether nearly all of the texts are of this form."""
    return sum(pattern.fullmatch(word) is not None for word in words) > 0.9 * len(words)


def _is_constant(column: ColumnSummary) -> bool:
    if column.missing:
        return not column.texts and not column.numbers
    return len(column.words) == 1 if column.texts else column.low == column.high


def _are_identifiers(fields: Fields, rows: Array) -> bool:
    """Whether a column has another whole number in every row."""
    if len(rows) <= LEAST_ROWS:
        return False
    for some in (rows[:ROWS_LOOKED_AT], rows):  # most columns are no identifiers, and their first rows show it
        values = fields.numbers[some]
        if not (values == np.floor(values)).all() or len(np.unique(values)) < len(values):
            return False
    return True


def about_clients(data: Dataset) -> list[str]:
    """Classes that a single client has."""
    if data.owners is None or not data.classes:
        return []
    names, owner = np.unique(data.owners, return_inverse=True)
    if len(names) < 2:
        return []
    pairs = np.unique(data.train.y.numpy() * len(names) + owner.reshape(-1))
    code, client = pairs // len(names), pairs % len(names)
    counts = np.bincount(code, minlength=len(data.classes))
    alone = [(data.classes[c], names[k]) for c, k in zip(code.tolist(), client.tolist(), strict=True) if counts[c] == 1]
    found = [f"only client {client} has the class {name}" for name, client in alone[:LONELY_SHOWN]]
    return found + (
        [f"{len(alone) - LONELY_SHOWN} more classes are those of one client"] if len(alone) > LONELY_SHOWN else []
    )


def about_sizes(names: Sequence[str], sizes: Array) -> list[str]:
    """Very unequal clients whose uploads count alike."""
    small, large = int(sizes.argmin()), int(sizes.argmax())
    if sizes[large] < UNEQUAL * sizes[small]:
        return []
    return [
        f"clients have {sizes[small]:,} ({names[small]}) to {sizes[large]:,} ({names[large]}) training samples and "
        "count alike: cohort.weighting: samples weighs them by their samples"
    ]


def about_test_rows(data: Dataset) -> list[str]:
    """Test rows that are also training rows, so that figures on them are too high."""
    if data.test is None:
        return []
    many = count_repeated(data.train, data.test)
    if many <= REPEATED * len(data.test):
        return []
    return [f"{many:,} of the {len(data.test):,} test rows are also training rows: figures on them may be too high"]


def count_repeated(train: Samples, others: Samples) -> int:
    """How many of the other samples are training samples, with the same inputs and label."""
    trained, tested = np.sort(_hashes(train)), _hashes(others)
    place = np.minimum(np.searchsorted(trained, tested), len(trained) - 1)
    return int((trained[place] == tested).sum())


def _hashes(samples: Samples) -> Array:
    """A number for every sample, from the bits of its inputs and its label; equal samples have equal ones."""
    found = np.zeros(len(samples), dtype=np.uint64)
    for name, tensor in (("inputs", samples.x), ("labels", samples.y)):
        parts = tensor.reshape(len(samples), -1).contiguous().view(torch.uint8).numpy()
        parts = parts.view(np.uint32) if parts.shape[1] % 4 == 0 else parts
        factors = generator(0, f"hash {name}").integers(0, 2**63, parts.shape[1], dtype=np.uint64) * 2 + 1
        for first in range(0, len(parts), HASHED_AT_ONCE):
            block = slice(first, first + HASHED_AT_ONCE)
            found[block] += parts[block].astype(np.uint64) @ factors
    return found
