"""New rows without labels get the features that the same rows get in a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedadc.data.loaders.csv import csv_table
from fedadc.data.loaders.rows import features_of
from fedadc.data.schema import DataSchema
from fedadc.errors import DataError, FedadcError
from fedadc.fields.plain import from_json, to_json

ROWS = ["age,color,label", "30,red,a", "50,blue,b", ",red,a", "41,,b"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "train.csv"
    path.write_text("\n".join(ROWS) + "\n")
    return path


def test_rows_from_a_file_and_from_memory_are_encoded_as_in_training(table: Path, tmp_path: Path) -> None:
    data = csv_table(table, "label", scale={"age": [40, 10]})
    schema = from_json(DataSchema, to_json(DataSchema.of(data)), "a test")
    assert schema == DataSchema.of(data) and schema.spec == data.spec and schema.encoding is not None
    new = tmp_path / "new.csv"
    new.write_text("color,note,age\nred,x,30\nblue,x,50\nred,x,\n,x,41\n")
    columns = {"age": [30, 50, None, 41.0], "color": ["red", "blue", "red", float("nan")]}
    for rows in (new, columns):
        assert torch.equal(features_of(rows, schema.encoding), data.train.x)


def test_rows_that_do_not_fit_are_refused(table: Path, tmp_path: Path) -> None:
    encoding = csv_table(table, "label").encoding
    assert encoding is not None
    with pytest.raises(DataError, match="the table lacks the column color"):
        features_of({"age": [1]}, encoding)
    with pytest.raises(DataError, match="column age has 1 values, but column color has 0; all columns need as many"):
        features_of({"age": [1], "color": []}, encoding)
    pandas = pytest.importorskip("pandas")
    for empty in ({}, pandas.DataFrame(), pandas.DataFrame(index=range(3))):
        with pytest.raises(DataError, match=r"^the table has no columns\.$"):
            features_of(empty, encoding)
    with pytest.raises(DataError, match=r"^the table has no rows\.$"):
        features_of(pandas.DataFrame({"age": [], "color": []}), encoding)
    for single in (1, None, "red", np.float64(3), np.zeros(()), np.zeros((2, 2)), {0: 1}):
        with pytest.raises(DataError, match="column age must be a list or an array with a value for each row, not "):
            features_of({"age": single, "color": ["red", "red"]}, encoding)
    with pytest.raises(DataError, match=r"column age: '\[0\. 0\.\]' is not a number"):
        features_of({"age": [np.zeros(2)], "color": ["red"]}, encoding)


def test_gaps_of_pandas_are_missing_values(table: Path) -> None:
    pandas = pytest.importorskip("pandas")
    encoding = csv_table(table, "label").encoding
    assert encoding is not None
    expected = features_of({"age": [1, None, 3], "color": ["red", None, "blue"]}, encoding)
    for kind in ("Int64", "Float64", object):
        ages = pandas.Series([1, pandas.NA, 3], dtype=kind)
        for colors in (
            pandas.Series(["red", pandas.NA, "blue"], dtype=kind) for kind in (object, "string", "category")
        ):
            assert torch.equal(features_of(pandas.DataFrame({"age": ages, "color": colors}), encoding), expected)
    with pytest.raises(FedadcError, match="rows must be a path, a DataFrame or columns by name, not int"):
        features_of(3, encoding)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"center":40.0', '"center":null', "center"),
        ('"spread":10.0', '"spread":0', "constants or categories that cannot be"),
        ('"dtype":"float32"', '"dtype":"load"', "unknown type"),
        ('"shape":[5]', '"shape":[50]', "columns give"),
        ('"name":"color"', '"name":"age"', "two columns of an encoding have the same name"),
        ("{", "[", "gave what cannot be read"),
    ],
)
def test_a_stored_schema_that_was_changed_is_refused(
    table: Path, tmp_path: Path, old: str, new: str, words: str
) -> None:
    text = to_json(DataSchema.of(csv_table(table, "label", scale={"age": [40, 10]}))).decode()
    changed = text.replace(old, new)
    assert changed != text, text
    path = tmp_path / "schema.json"
    path.write_text(changed)
    with pytest.raises(DataError, match=words):
        DataSchema.read(path)
