"""Summaries of clients' rows: their merger is the summary of all rows together, and they are plain values."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedadc.data.columns import Fields
from fedadc.data.spelling import DEFAULT_SPELLING, number, number_name
from fedadc.data.summaries import ColumnSummary, TableSummary, merge, merged_summary, summaries
from fedadc.errors import FedadcError

WORDS = st.sampled_from(["", "NaN", "-nan", "inf", "1e31", "1", " 1 ", "-2.5", "1_0", "٣", "x", " x", "y z", "1e-300"])
ROWS = st.lists(st.tuples(WORDS, WORDS, st.integers(0, 3)), min_size=1, max_size=40)


def by_definition(texts: list[str], as_text: bool) -> ColumnSummary:
    """A summary, one field after the other."""
    present = [text.strip() for text in texts if not DEFAULT_SPELLING.is_missing(text)]
    numbers = [float(t) for t in present if not np.isnan(number(t))]
    words = [t for t in present if np.isnan(number(t))]
    numbers, words = ([], words + [number_name(n) for n in numbers]) if as_text else (numbers, words)
    low, high = (min(numbers), max(numbers)) if numbers else (None, None)
    return ColumnSummary(len(numbers), len(words), len(texts) - len(present), tuple(sorted(set(words))), low, high)


@settings(max_examples=150)
@given(ROWS, st.booleans())
def test_a_summary_is_what_it_says_and_merging_is_pooling(rows: list[tuple[str, str, int]], as_text: bool) -> None:
    first, second, owner = (list(column) for column in zip(*rows, strict=True))
    fields, labels = (
        {"a": Fields.read(first), "b": Fields.read(second)},
        Fields.read([f"l{t}" for t in first], names=True),
    )
    clients = [np.flatnonzero(np.array(owner) == k) for k in sorted(set(owner))]
    found = summaries(fields, labels, clients, as_text={"b"} if as_text else ())
    for summary, own in zip(found, clients, strict=True):
        assert summary.columns["a"] == by_definition([first[i] for i in own], as_text=False)
        assert summary.columns["b"] == by_definition([second[i] for i in own], as_text)
        assert summary.labels == tuple(sorted({f"l{first[i]}".strip() for i in own})) and summary.rows == len(own)
    (pooled,) = summaries(fields, labels, [np.arange(len(rows))], as_text={"b"} if as_text else ())
    assert merge(found) == pooled == merge(found[::-1])
    texts, summed = {"b"} if as_text else set(), {"a", "b"}
    told = summaries(fields, labels, clients, texts, summed)
    assert merge(told) == merged_summary(fields, labels, clients, texts, summed)
    for k, own in enumerate(clients):  # a site has no other rows
        assert summaries(fields, labels, [own], texts, summed) == [told[k]]


def test_numbers_are_read_as_float64_and_words_are_not_numbers() -> None:
    fields = Fields.read(["0.1", "1_0", "-nan", "inf", "1e31", "none", " 7 "])
    assert fields.numbers[0] == 0.1 and fields.numbers[6] == 7
    assert np.isnan(fields.numbers[1:6]).all() and fields.words == ("1_0", "-nan", "inf", "1e31")
    assert fields.missing.tolist() == [False] * 5 + [True, False]


def test_a_summary_survives_a_message() -> None:
    fields = {"a": Fields.read(["0.1", "", "x"]), "b": Fields.read(["", "", ""])}
    (summary,) = summaries(fields, Fields.read(["1", "2", "1"], names=True), [np.arange(3)])
    sent = json.loads(json.dumps(asdict(summary), allow_nan=False))
    columns = {name: ColumnSummary(**{**c, "words": tuple(c["words"])}) for name, c in sent["columns"].items()}
    assert TableSummary(sent["rows"], columns, tuple(sent["labels"])) == summary
    assert summary.mixed == {"a"} and summary.columns["b"].low is None


def test_tables_with_other_columns_cannot_be_merged() -> None:
    one, other = (TableSummary(1, {name: ColumnSummary(1)}, ("x",)) for name in "ab")
    with pytest.raises(FedadcError, match="the same columns"):
        merge([one, other])


def test_many_clients_take_seconds() -> None:
    """A loop over clients and fields would take minutes."""
    fields = {str(k): Fields.read(["1", "x", "", "2.5"] * 20_000) for k in range(3)}
    clients = np.split(np.arange(80_000), np.arange(2, 80_000, 2))
    merged = merge(summaries(fields, Fields.read(["l"] * 80_000, names=True), clients))
    assert merged.columns["0"] == ColumnSummary(40_000, 20_000, 20_000, ("x",), 1.0, 2.5)
