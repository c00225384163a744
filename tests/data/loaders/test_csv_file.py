"""Both ways of reading a file give the same columns, whatever is in it, and a table has the size of its numbers."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedadc.data.columns import Fields
from fedadc.data.loaders import csv_file
from fedadc.data.loaders.csv_file import read_columns
from fedadc.data.spelling import DEFAULT_SPELLING, Spelling
from fedadc.errors import FedadcError

CELLS = st.sampled_from(
    ["1", "-2.5", " 3 ", "1e5", "0.1", "12345678.123456789", "1e-300", "", " ", "NA", "nan", "-nan", "?", "inf", "1e31",
     "1_0", "٣", "x", " x", "y z", "a,b", 'q"q', "two\nlines", "\x0b7", "\x1d", "-9", "-9.0", "x\u2028y", "0x10"]
)  # fmt: skip
PLAIN = st.sampled_from(["1", "-2.5", "0.1", "", "NA", "1e31"])
MISSING = st.sampled_from([DEFAULT_SPELLING, Spelling(missing=("-9", "x")), Spelling(missing=())])


def same(found: Fields, expected: Fields) -> None:
    texts = [[fields.text(row) for row in range(len(fields))] for fields in (found, expected)]
    assert texts[0] == texts[1]
    assert found.numbers.tobytes() == expected.numbers.tobytes() and np.array_equal(found.missing, expected.missing)


@settings(max_examples=200, deadline=None)
@given(st.data(), MISSING)
def test_columns_are_their_fields_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, spelling: Spelling
) -> None:
    """The reference reads the whole file with the csv module; blocks of a few characters go through every path."""
    kinds = data.draw(st.lists(st.sampled_from([CELLS, PLAIN]), min_size=2, max_size=4))
    rows = data.draw(st.lists(st.tuples(*kinds), min_size=1, max_size=30))
    header = [f"c{k}" for k in range(len(kinds))]
    path = tmp_path_factory.mktemp("table") / "a.csv"
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator=end).writerows([header, *rows])
    block = data.draw(st.sampled_from([1, 20, 100, 1 << 21]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_file, "PARSED_AT_ONCE", block)
        patch.setattr(csv_file, "PARSED_FIRST", block)
        patch.setattr(csv_file, "LARGE", data.draw(st.sampled_from([0, 1 << 24])))
        found = read_columns(path, spelling, lambda _: (["c0"], []))
    assert list(found) == header
    for k, name in enumerate(header):
        same(found[name], Fields.read([row[k] for row in rows], spelling, names=name == "c0"))


@pytest.mark.parametrize("by", ["pyarrow", "numpy"])
def test_numbers_are_those_of_float_to_the_last_bit(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_file, "LARGE", 0 if by == "pyarrow" else 1 << 24)
    rng = np.random.default_rng(0)
    values = rng.normal(size=4000) * 10.0 ** rng.integers(-25, 25, 4000)
    texts = [f"{value:.{digits}e}" for value, digits in zip(values, rng.integers(1, 18, 4000), strict=True)]
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "".join(f"{text},x\n" for text in texts))
    found = read_columns(path, DEFAULT_SPELLING, lambda _: ((), ["b"]))
    assert list(found) == ["a"] and found["a"].numbers.tobytes() == np.array([*map(float, texts)]).tobytes()


@pytest.mark.parametrize("by", ["pyarrow", "numpy"])
@pytest.mark.parametrize("block", [1, 30, 1 << 21])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("1,2,3", "row 102 has 3 fields, but the header has 2"),
        ("7", "row 102 has 1 fields, but the header has 2"),
        ('1,"x"y', "is not a CSV file in UTF-8"),
        ('1,"x', "is not a CSV file in UTF-8"),
        ("1,a\0b", "line 103 contains a NUL byte"),
        ("1,\ud800", "is not a CSV file in UTF-8"),
    ],
)
def test_a_bad_row_in_the_middle_is_named(
    bad: str, words: str, block: int, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_file, "LARGE", 0 if by == "pyarrow" else 1 << 24)
    path = tmp_path / "a.csv"
    good = "1.5,x\n" * 100
    path.write_bytes(f"a,b\n\n{good}{bad}\n{good}".encode(errors="surrogatepass"))
    monkeypatch.setattr(csv_file, "PARSED_AT_ONCE", block)
    monkeypatch.setattr(csv_file, "PARSED_FIRST", block)
    with pytest.raises(FedadcError, match=words):
        read_columns(path, DEFAULT_SPELLING, lambda _: (["b"], []))


@pytest.mark.parametrize("by", ["pyarrow", "numpy"])
def test_a_plain_table_is_not_left_to_the_csv_module(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, texts, empty fields and NA: after the first blocks, nothing is read field by field."""
    monkeypatch.setattr(csv_file, "LARGE", 0 if by == "pyarrow" else 1 << 24)
    path, read = tmp_path / "a.csv", []
    path.write_text("a,b,c,d\n" + "1.5,,red,NA\n,-2e3,blue,7\n+3,4.,,8\n" * 20_000)
    slow = csv_file._Reader._read
    monkeypatch.setattr(csv_file._Reader, "_read", lambda self, block: (read.append(len(block)), slow(self, block)))
    found = read_columns(path, DEFAULT_SPELLING, lambda _: ((), ()))
    assert len(found["a"]) == 60_000 and found["c"].words == ("red", "blue")
    assert sum(read) <= 2 * csv_file.PARSED_FIRST, read
