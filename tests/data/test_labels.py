"""Labels that are no classes are refused with the way out, and classes pass, however many there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedadc.data.labels import require_classes
from fedadc.data.loaders.csv import csv_table
from fedadc.data.spelling import Spelling, likeness, spelled
from fedadc.errors import DataError


@pytest.mark.parametrize(
    ("labels", "rows"),
    [
        (["0", "1"], 2),
        ([str(k) for k in range(1000)], 5000),
        ([str(k) for k in range(1, 101)], 500),
        ([str(k) for k in range(100) if k % 12], 500),  # a few classes that did not occur
        ([str(1000 + k) for k in range(20)], 200),
        ([f"class {k}" for k in range(300)], 900),
        (["-1", "1"], 50),
        ([str(k) for k in range(18)], 18),  # too few rows to tell
    ],
)
def test_classes_pass(labels: list[str], rows: int) -> None:
    require_classes(labels, rows, "it")


@pytest.mark.parametrize(
    ("labels", "rows", "words"),
    [
        (
            [str(k) for k in range(126, 565)],
            920,
            r"the label is a number with 439 values from 126 to 564",
        ),
        ([str(k) for k in range(29, 78)], 50_000, "with 49 values from 29 to 77"),
        ([str(k) for k in range(-15, 15)], 900, "with 30 values from -15 to 14"),
        (["1", "2", "2.5"], 90, "the label 2.5 is a number with decimals; set task: regression"),
        ([f"p{k}" for k in range(40)], 40, "each of the 40 rows has another label, so no class can be learned"),
        ([str(k) for k in range(40)], 40, "each of the 40 rows has another label"),
    ],
)
def test_what_is_no_class_is_refused_unless_the_task_says_so(labels: list[str], rows: int, words: str) -> None:
    with pytest.raises(DataError, match=words):
        require_classes(labels, rows, "it")
    require_classes(labels, rows, "it", "classification")


def test_a_table_with_a_quantity_as_label_is_refused_before_anything_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,chol,id\n" + "".join(f"{k % 7},{130 + k},p{k}\n" for k in range(90)))
    with pytest.raises(DataError, match=r"t\.csv, column chol: each of the 90 rows"):
        csv_table(path, "chol")
    with pytest.raises(DataError, match=r"t\.csv, column id: each of the 90 rows"):
        csv_table(path, "id")
    assert len(csv_table(path, "chol", task="classification").classes) == 90


@pytest.mark.parametrize(
    ("text", "name"),
    [("+1", "1"), ("1.", "1"), ("-1.50", "-1.5"), (" 0.0 ", "0"), ("01", "01"), ("1e3", "1e3"), ("-", "-"),
     (".5", ".5"), ("9" * 30 + ".0", "9" * 30), ("", ""), ("a  b", "a  b")],
)  # fmt: skip
def test_a_number_has_one_spelling(text: str, name: str) -> None:
    assert spelled(text) == name == spelled(name)


def test_names_that_look_alike_are_refused_or_merged() -> None:
    names = ["Sick", "sick", "SI CK", "well", "007", "7", "000", "0"]
    found = Spelling(merge_names=True).one_name(names, "t.csv")
    assert found == {"Sick": "SI CK", "sick": "SI CK", "SI CK": "SI CK", "well": "well", "007": "007", "7": "007",
                     "000": "0", "0": "0"}  # fmt: skip
    assert likeness("Straße") == likeness("STRASSE")
    for one, other in (("Sick", "sick"), ("New York", "NewYork"), ("01", "1")):
        with pytest.raises(DataError, match=f"t.csv has '{min(one, other)}' and '{max(one, other)}', which"):
            Spelling().one_name([one, other], "t.csv")


@pytest.mark.parametrize("column", ["label", "who"])
def test_look_alikes_in_a_table(column: str, tmp_path: Path) -> None:
    names = ["North", "south", "north ", "NORTH", "south"]
    other = ["p", "q", "p", "q", "q"]
    rows = zip(*((names, other) if column == "label" else (other, names)), strict=True)
    path = tmp_path / "t.csv"
    path.write_text("a,label,who\n" + "".join(f"{k},{label},{who}\n" for k, (label, who) in enumerate(rows)))
    with pytest.raises(DataError, match=f"column {column} has 'NORTH' and 'North', .* set merge_names: true"):
        csv_table(path, "label", "who")
    data = csv_table(path, "label", "who", merge_names=True)
    found = data.owners.tolist() if column == "who" else [data.classes[y] for y in data.train.y.tolist()]
    assert found == ["NORTH", "south", "NORTH", "NORTH", "south"]
