"""CSV tables: every column is encoded in the same way for all rows, and errors name the row and the column."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedadc.config.build import load_data, prepare
from fedadc.data import HeldOut, from_csv
from fedadc.data.loaders.csv import csv_table
from fedadc.data.loaders.samples import read_samples
from fedadc.errors import FedadcError
from fedadc.runs.record import load_config


def write(path: Path, *rows: str, encoding: str = "utf-8") -> Path:
    path.write_text("\n".join(rows) + "\n", encoding=encoding)
    return path


def features(path: Path, **options: Any) -> list[list[float]]:
    return csv_table(path, "label", **{"scale": "none", **options}).train.x.tolist()


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    return tmp_path / "my.csv"


def test_numbers_are_not_changed_without_scale(csv: Path) -> None:
    write(csv, "a,label,b", "1,0,-2.5", " 3e-1 ,1,4")
    data = csv_table(csv, "label", scale="none")
    assert data.name == "my.csv" and data.input_shape == (2,) and data.owners is None and data.test is None
    np.testing.assert_allclose(data.train.x.numpy(), [[1, -2.5], [0.3, 4]], rtol=1e-7)
    assert data.normalization.scale == 1 and not data.normalization.mean


def test_scale_constants(csv: Path) -> None:
    write(csv, "age,height,label", "30,180,0", "50,160,1", ",170,1")
    assert features(csv, scale={"age": [40, 20]}) == [[-0.5, 0, 180], [0.5, 0, 160], [0, 1, 170]]


def test_text_becomes_one_column_per_category(csv: Path) -> None:
    write(csv, "color,label", "red,0", " blue ,1", "green,0", "red,1")
    assert features(csv) == [[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]  # blue, green, red


@pytest.mark.parametrize("mark", ["", " ", "NA", "n/a", "NaN", "null", "None", "?"])
def test_missing_values(csv: Path, mark: str) -> None:
    """A missing number is the center and marked beside; a missing text is a category of its own, the last."""
    write(csv, "size,color,label", "3,red,0", f"{mark},blue,1", f"5,{mark},0")
    assert features(csv) == [[3, 0, 0, 1, 0], [0, 1, 1, 0, 0], [5, 0, 0, 0, 1]]
    assert features(csv, scale={"size": [4, 2]})[1][:2] == [0, 1]


def test_the_test_file_is_encoded_with_the_training_columns(csv: Path, tmp_path: Path) -> None:
    """Columns in another order, one more, other categories, missing values: the features stay the same columns."""
    write(csv, "size,color,label", "3,red,yes", ",blue,no")
    test = write(tmp_path / "test.csv", "color,extra,label,size", "red,x,no,7", "purple,x,yes,", ",x,yes,1")
    data = csv_table(csv, "label", test=test, scale={"size": [1, 2]})
    # size, size missing, blue, red
    assert data.train.x.tolist() == [[1, 0, 0, 1], [0, 1, 1, 0]]
    assert data.test.x.tolist() == [[3, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]  # purple and no color: all zeros
    assert data.classes == ("no", "yes") and data.test.y.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["size,color", "1,red"], ["lacks the column label"]),
        (["color,label", "red,yes"], ["lacks the column size"]),
        (["size,color,label", "1,red,yes", "big,red,yes"], ["row 3", "column size", "'big' is not a number"]),
        (["size,color,label", "1,red,maybe"], ["maybe", "does not occur in training"]),
        (["size,color,label"], ["needs a header and at least one row"]),
    ],
)
def test_a_test_file_that_does_not_fit_is_refused(csv: Path, tmp_path: Path, rows: list[str], words: list[str]) -> None:
    write(csv, "size,color,label", "3,red,yes", "4,blue,no")
    test = write(tmp_path / "test.csv", *rows)
    with pytest.raises(FedadcError) as error:
        csv_table(csv, "label", test=test)
    assert all(word in str(error.value) for word in words), error.value


def test_test_labels_are_mapped_by_name_even_where_they_look_like_numbers(csv: Path, tmp_path: Path) -> None:
    """ "01" is a name in training (there is "x", so labels are text); in the test file it is the same name."""
    write(csv, "a,label", "1,x", "2,01", "3,02")
    test = write(tmp_path / "test.csv", "a,label", "1,01")
    data = csv_table(csv, "label", test=test)
    assert data.classes == ("01", "02", "x")
    assert data.test.y.tolist() == [0]


def test_the_client_column_is_the_federation_and_no_feature(csv: Path) -> None:
    write(csv, "who,a,label", " ann ,1,0", "bob,2,1", "ann,3,1")
    data = csv_table(csv, "label", client="who", scale="none")
    assert data.owners.tolist() == ["ann", "bob", "ann"]
    assert data.train.x.tolist() == [[1], [2], [3]]


def test_dropped_columns_are_no_features(csv: Path) -> None:
    write(csv, "id,a,label", "x1,1,0", "x2,2,1")
    assert features(csv, drop=["id"]) == [[1], [2]]


@pytest.mark.parametrize(
    ("labels", "classes", "codes"),
    [
        (["10", "9", "10"], ("9", "10"), [1, 0, 1]),  # as numbers: 9 before 10
        (["-1", " 1", "1"], ("-1", "1"), [0, 1, 1]),
        ([" yes", "no", "yes "], ("no", "yes"), [1, 0, 1]),
        (["1", "two", "1"], ("1", "two"), [0, 1, 0]),
        (["1.0", "2.", "+1"], ("1", "2"), [0, 1, 0]),  # a number has one spelling
        (["007", "2E3", "007"], ("007", "2E3"), [0, 1, 0]),  # leading zeros and exponents may be names
        (["-0", "0.0", "0.50", "0.5x"], ("0", "0.5", "0.5x"), [0, 0, 1, 2]),
        (["+5", "3\x1d", "5"], ("3", "5"), [1, 0, 1]),  # white space to `strip`, but not to `int`
        (["+-5", "3", "3"], ("+-5", "3"), [0, 1, 1]),  # signs and digits, but no number
        (["9" * 30, "3", "3"], ("3", "9" * 30), [1, 0, 0]),  # beyond 64 bits
    ],
)
def test_labels(csv: Path, labels: list[str], classes: tuple[str, ...], codes: list[int]) -> None:
    write(csv, "a,label", *(f"{i},{v}" for i, v in enumerate(labels)))
    data = csv_table(csv, "label")
    assert (data.classes, data.train.y.tolist()) == (classes, codes)


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (["a,label", "1,0", "1,2,3", "2,1"], {}, ["row 3", "3 fields", "header has 2"]),
        (["a,label", "1,0", "7"], {}, ["row 3", "1 fields"]),
        (["a,a,label", "1,2,0"], {}, ["two columns have the same name"]),
        (["a, a,label", "1,2,0"], {}, ["two columns have the same name"]),
        (["a,label"], {}, ["a header and at least one row"]),
        ([""], {}, ["a header and at least one row"]),
        (["a,lable", "1,0"], {}, ["column 'label' is unknown", "did you mean 'lable'"]),
        (["patient,a,label", "1,1,0"], {"client": "patients"}, ["'patients'", "did you mean 'patient'"]),
        (["age,a,label", "1,1,0"], {"drop": ["agee"]}, ["'agee'", "did you mean 'age'"]),
        (["age,a,label", "1,1,0"], {"scale": {"aeg": [0, 1]}}, ["'aeg'", "did you mean 'age'"]),
        (
            ["a,label", "red,0", "blue,1"],
            {"scale": {"a": [0, 1]}},
            ["column a", "'red' is not a number", "scale needs numbers"],
        ),
        (["a,label", "1,0", "2,1"], {"scale": {"a": [0, 0]}}, ["scale.a must", "spread above 0"]),
        (["a,label", "1,0", "2,1"], {"scale": {"a": [0]}}, ["scale.a must", "[center, spread]"]),
        (["a,label", "1,0", "1e30,1"], {"scale": {"a": [0, 1e-20]}}, ["row 3, column a: '1e+30' is too large when"]),
        (["a,label", "1,0", "2,"], {}, ["row 3", "label is missing"]),
        (["who,label", "1,0", "2,1"], {"client": "who"}, ["no feature column left"]),
        (["a,label", "1,0", "2,0"], {}, ["fewer than two classes"]),
        (["a,label", '"1,0', "2,0"], {}, ["not a CSV file"]),
        (
            ["a,label", "1,0", "1e300,1"],
            {},
            ["column a", "'1e300' is too large (at most 1e+30); list it in missing if it marks a gap"],
        ),  # beyond float32
    ],
)
def test_a_table_that_is_wrong_says_where(csv: Path, rows: list[str], options: dict, words: list[str]) -> None:
    write(csv, *rows)
    with pytest.raises(FedadcError) as error:
        csv_table(csv, "label", **options)
    assert all(word in str(error.value) for word in [str(csv.name), *words][words[0].startswith("scale.a") :])


def test_other_files_are_refused(csv: Path, tmp_path: Path) -> None:
    with pytest.raises(FedadcError, match="there is no file"):
        csv_table(tmp_path / "none.csv", "label")
    write(csv, "a,label", "é,0", "b,1", encoding="latin-1")
    with pytest.raises(FedadcError, match=r"my\.csv is not a CSV file in UTF-8"):
        csv_table(csv, "label")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_byte_order_mark_line_ends_and_quotes(csv: Path, encoding: str, end: str) -> None:
    text = end.join(["größe,text,label", '1,"a, b",0', "", '2,"say ""hi""",1', ""])
    csv.write_bytes(text.encode(encoding))
    data = csv_table(csv, "label", scale="none")
    assert data.train.x.tolist() == [[1, 1, 0], [2, 0, 1]]
    assert data.notes[0].startswith("größe: number")


def test_notes_state_every_column(csv: Path) -> None:
    write(csv, "age,color,income,gap,label", "30,red,20000,1,0", "50,blue,-4,,1")
    notes = csv_table(csv, "label", scale={"age": [40, 20]}).notes
    assert notes[:4] == (
        "age: number, 30 to 50, scaled by (40, 20)",
        "color: text, 2 categories",
        "income: number, -4 to 20000, not scaled",
        "gap: number, 1 to 1, not scaled, missing values marked",
    )
    assert len(notes) == 5 and notes[4].startswith("income has values beyond ±10") and "scale" in notes[4]


@given(st.data())
def test_a_row_depends_on_no_other_row(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Nothing is computed from pooled statistics: another value in one row leaves the features of all others alone.

    The last two rows keep every category and a missing value in the table, so that the columns stay the same.
    """
    cells = st.tuples(st.sampled_from(["-7.5", "0", "3", "1e6", ""]), st.sampled_from(["red", "blue", ""]))
    rows = data.draw(st.lists(cells, min_size=1, max_size=5))
    at, other = data.draw(st.integers(0, len(rows) - 1)), data.draw(cells)
    changed = [*rows[:at], other, *rows[at + 1 :]]
    fixed = [("", "red"), ("1", "blue"), ("1", "")]
    path = tmp_path_factory.mktemp("table") / "a.csv"
    found = []
    for version in (rows, changed):
        write(path, "size,color,label", *(f"{a},{b},{i % 2}" for i, (a, b) in enumerate([*version, *fixed])))
        found.append(np.delete(csv_table(path, "label", scale={"size": [1, 3]}).train.x.numpy(), at, axis=0))
    assert np.array_equal(*found)


@pytest.mark.parametrize("word", ["nan", "NA", "?", "None", " n/a ", "<NA>"])
@pytest.mark.parametrize("column", ["label", "who"])
@pytest.mark.parametrize("others", ["01", "yn"])
def test_a_missing_label_or_client_is_refused(word: str, column: str, others: str, tmp_path: Path) -> None:
    rows = [[others[0], "p"], [others[1], "q"], [others[0], "p"]]
    rows[1][column == "who"] = word
    path = write(tmp_path / "t.csv", "a,label,who", *(f"{i},{label},{who}" for i, (label, who) in enumerate(rows)))
    what = "client" if column == "who" else "label"
    with pytest.raises(FedadcError, match=rf"t\.csv, row 3, column {column}: the {what} is missing; complete"):
        csv_table(path, "label", "who")


def test_the_spellings_of_missing_values_can_be_set(tmp_path: Path) -> None:
    """They hold for features, labels and clients, and numbers may be among them; an empty field is always missing."""
    path = write(tmp_path / "t.csv", "a,b,label,who", "1,red,none,NA", "-9,?,no,p", "-9.0,-9,none,p", ",red,no,p")
    data = csv_table(path, "label", "who", scale="none", missing=[-9])
    assert data.classes == ("no", "none") and data.owners.tolist() == ["NA", "p", "p", "p"]
    assert data.train.x.tolist() == [[1, 0, 0, 1, 0], [0, 1, 1, 0, 0], [0, 1, 0, 0, 1], [0, 1, 0, 1, 0]]
    with pytest.raises(FedadcError, match=r"row 3, column who: the client is missing"):
        csv_table(path, "label", "who", missing=["p"])


def test_a_client_column_in_the_test_table_gives_the_test_owners(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,site,y\n1,n,0\n2,s,1\n")
    (tmp_path / "held.csv").write_text("a,site,y\n3,s,1\n")
    (tmp_path / "bare.csv").write_text("a,y\n3,1\n")
    read = partial(csv_table, tmp_path / "train.csv", "y", "site")
    assert read(test=tmp_path / "held.csv").test_owners.tolist() == ["s"]  # type: ignore[union-attr]
    assert read(test=tmp_path / "bare.csv").test_owners is None


def test_further_rows_are_read_with_the_columns_of_the_training_rows(tmp_path: Path) -> None:
    """Also where all rows of the table have more categories than the training rows."""
    colors = ["red", "blue"] * 20
    held_out = HeldOut(0.25, seed=2)
    only_held_out = held_out.rows(np.arange(40) % 2).test[0]
    colors[only_held_out] = "green"
    path = write(tmp_path / "t.csv", "color,label", *(f"{color},{i % 2}" for i, color in enumerate(colors)))
    data = csv_table(path, "label", held_out=held_out)
    more = write(tmp_path / "more.csv", "label,color", "1,green", "0,red")
    found = read_samples(more, data)
    assert data.input_shape == (2,) and found.x.tolist() == [[0, 0], [0, 1]] and found.y.tolist() == [1, 0]
    with pytest.raises(FedadcError, match=r"more\.csv lacks the column color"):
        read_samples(write(more, "label", "1"), data)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write(tmp_path / "t.csv", "who,a,label", *(f"{'pq'[i // 20]},{i},{i % 2}" for i in range(40)))


@pytest.mark.parametrize("client", [None, "who"])
def test_from_csv_gives_the_data_of_a_config(table: Path, client: str | None) -> None:
    """A test share is held out as on the command line."""
    drop, scale = [] if client else ["who"], {"a": (10, 5)}
    data = from_csv(str(table), label="label", client=client, validation=0.25, drop=drop, scale=scale, seed=4)
    node = {"name": "csv", "path": str(table), "label": "label", "drop": drop, "scale": {"a": [10, 5]}}
    tree = {"rounds": 1, "model": "logistic", "seed": 4, "data": {**node, "client": client, "validation": 0.25}}
    config, expected = load_data(
        load_config({**tree, "data": {**tree["data"], "clients": 2 if client is None else None}})
    )
    assert config.data.test == 0.2 and list(data.splits()) == ["train", "validation", "test"]
    for part, samples in data.splits().items():
        assert torch.equal(samples.x, expected.splits()[part].x)
        assert torch.equal(samples.y, expected.splits()[part].y)
    assert len(data.test or ()) == 8 and len(data.validation or ()) == 8


def test_from_csv_takes_a_test_file_or_a_share(table: Path) -> None:
    assert len(from_csv(table, "label", test=0.5, drop=["who"]).test or ()) == 20
    both = from_csv(table, "label", "who", test=str(table))
    assert len(both.train) == len(both.test or ()) == 40 and both.test_owners is not None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"test": 1.5}, r"^test must be a share between 0 and 1, not 1\.5"),
        ({"test": ["x"]}, r"^test must be a path, not \['x'\]"),
        ({"test": "absent.csv"}, r"there is no file absent\.csv"),
        ({"validation": 1e-9}, r"^validation: a share of 1e-09 of 32 samples is empty"),
        ({"drop": "who"}, r"^drop must be a list of columns, not 'who'"),
        (
            {"scale": [1, 2]},
            r"^scale must be standard, per-client, none or map columns to .center, spread., not \[1, 2\]",
        ),
        ({"scale": "minmax"}, r"^scale must be standard, per-client, none or map columns .* not 'minmax'"),
        ({"scale": "per-client"}, r"^scale: per-client needs data that names its clients: set client"),
        ({"categories": "a"}, r"^categories must be a list, not 'a'"),
        ({"categories": ["b"]}, r"column 'b' is unknown"),
        ({"missing": "NA"}, r"^missing must be a list, not 'NA'"),
        ({"scale": {"a": 3}}, r"^scale\.a must be \[center, spread\] with a spread above 0, not 3"),
        ({"scale": {"a": (0, float("nan"))}}, r"^scale\.a must be \[center, spread\]"),
        ({"path": 3}, r"^path must be a path, not 3"),
        ({"task": "regresion"}, r"^task 'regresion' is unknown; did you mean 'regression'"),
        ({"drop": ["label"]}, r"^label and drop both name the column label; it has one use"),
        ({"client": "label"}, r"^label and client both name the column label"),
        ({"client": "who", "drop": ["who"]}, r"^client and drop both name the column who"),
        ({"drop": ["a"], "categories": ["a"]}, r"^drop and categories both name the column a"),
        ({"scale": {"a": (1, 2)}, "categories": ["a"]}, r"^categories and scale both name the column a"),
        ({"scale": {"label": (1, 2)}}, r"^label and scale both name the column label"),
        ({"categories": ["label"]}, r"^label and categories both name the column label"),
        ({"label": ["a", "label"], "task": "regression", "drop": ["a"]}, r"^label and drop both name the column a"),
    ],
)
def test_from_csv_names_the_argument_that_is_wrong(table: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FedadcError, match=words):
        from_csv(**{"path": table, "label": "label", **settings})


def test_accents_are_parts_of_their_letters(tmp_path: Path) -> None:
    """Some systems write ü as u and two dots: it is the same client, label and category."""
    lines = [f"{name},{name},{k},{name}" for k in range(20) for name in ("Zürich", "Zu\u0308rich", "Bern")]
    path = write(tmp_path / "t.csv", "client,kind,a,label", *lines)
    data = from_csv(path, "label", "client")
    assert data.classes == ("Bern", "Zürich") and {*np.asarray(data.owners).tolist()} == {"Bern", "Zürich"}
    assert data.encoding is not None and data.encoding.columns[0].categories == ("Bern", "Zürich")


def test_from_csv_may_keep_all_rows(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{k},{k % 2}\n" for k in range(10)))
    assert from_csv(tmp_path / "t.csv", "y", test=0).test is None
    assert len(from_csv(tmp_path / "t.csv", "y", test=0).train) == 10
    assert len(from_csv(tmp_path / "t.csv", "y").train) == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"clients": 10},
            r"clients is 10, but the data names 2 clients; remove clients, or set a",
        ),
        (
            {"partition": "iid", "clients": 2},
            r"data\.client says that column who names the clients, but",
        ),
        ({"partition": {"name": "dirichlet", "alpha": 0.5}}, r"or replace data\.client by data\.drop: \[who\]"),
    ],
)
def test_data_that_names_its_clients_is_not_dealt_anew(table: Path, change: dict[str, Any], words: str) -> None:
    node = {"name": "csv", "path": str(table), "label": "label", "client": "who", "missing": ["p?"]}
    tree = {"rounds": 1, "model": "logistic", "data": node}
    assert len(prepare(load_config(tree)).federation.client_names) == 2
    assert len(prepare(load_config({**tree, "data": {**node, "partition": "pooled"}})).federation.client_names) == 1
    with pytest.raises(FedadcError, match=words):
        prepare(load_config({**tree, "data": {**node, **change}}))
