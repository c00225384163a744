"""A DataFrame gives the samples of the CSV file that it would be written to, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedadc
from fedadc.data import Dataset, from_csv, from_frame
from fedadc.errors import DataError, FedadcError

pandas = pytest.importorskip("pandas")


def frame(rows: int = 120, seed: int = 0) -> Any:
    """Every kind of column that a DataFrame may have, with gaps."""
    rng = np.random.default_rng(seed)
    gap = rng.random(rows) < 0.2
    numbers = rng.normal(50, 20, rows)
    return pandas.DataFrame(
        {
            "float": np.where(gap, np.nan, numbers),
            "small": numbers.astype(np.float32),
            "int": rng.integers(-5, 500, rows),
            "nullable": pandas.array(np.where(gap, 1, rng.integers(0, 9, rows)), dtype="Int64").astype("Int64"),
            "text": [None if g else "abc"[k] for g, k in zip(gap, rng.integers(0, 3, rows), strict=True)],
            "category": pandas.Categorical(rng.choice(["low", "high"], rows)),
            "bool": rng.random(rows) < 0.5,
            " padded ": rng.choice([1.0, 2.0], rows),
            "where": rng.choice(["north", "south", "3"], rows),
            "label": rng.choice([0.0, 1.0, 2.0], rows),
        }
    )


def same(one: Dataset, other: Dataset) -> None:
    assert one.encoding == other.encoding and one.classes == other.classes and one.notes == other.notes
    for split, samples in one.splits().items():
        assert torch.equal(samples.x, other.splits()[split].x) and torch.equal(samples.y, other.splits()[split].y)
    for owners in ("owners", "test_owners"):
        assert np.array_equal(getattr(one, owners), getattr(other, owners))


@pytest.mark.parametrize(
    "settings",
    [{}, {"client": "where"}, {"client": "where", "scale": "per-client", "validation": 0.2},
     {"drop": ["where"], "categories": ["padded"], "missing": ["a", 3], "seed": 3},
     {"label": "float", "task": "regression", "missing": [""], "drop": ["text"]}],
)  # fmt: skip
def test_a_frame_is_its_csv_file(settings: dict[str, Any], tmp_path: Path) -> None:
    table = frame()
    if "task" in settings:
        table = table[table["float"].notna()]
    table["nullable"] = table["nullable"].mask(table["nullable"] == 1)
    table.to_csv(tmp_path / "t.csv", index=False)
    frame(40, 1).to_csv(tmp_path / "test.csv", index=False)
    arguments = {"label": "label", **settings}
    same(from_frame(table, **arguments), from_csv(tmp_path / "t.csv", **arguments))
    if "task" not in settings:
        same(
            from_frame(table, test=frame(40, 1), **arguments),
            from_csv(tmp_path / "t.csv", test=tmp_path / "test.csv", **arguments),
        )


def test_a_frame_trains(tmp_path: Path) -> None:
    data = from_frame(frame(), "label", client="where", name="visits")
    net = torch.nn.Linear(data.input_shape[0], 3)
    federation = fedadc.Federation(model=net, data=data, local=fedadc.LocalWork(steps=1, batch_size=4))
    assert federation.client_names == ("3", "north", "south") and repr(data).startswith("Dataset(visits, ")


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        ({}, {"label": "lable"}, r"frame: column 'lable' is unknown; did you mean 'label'"),
        ({"label": [None] + ["a", "b"] * 2}, {}, r"frame, row 2, column label: the label is missing"),
        ({"who": ["x"] * 4 + [float("nan")]}, {"client": "who"}, r"frame, row 6, column who: the client is missing"),
        ({"a": [1, 2, 3, 4, "x"]}, {}, r"frame, row 6, column a: 'x' is not a number"),
        ({"a": [1.0, 2, 3, 4, np.inf]}, {}, r"column a: 'inf' is not a number"),
        ({" a": [1] * 5}, {}, r"two columns of the table have the same name"),
        ({}, {"drop": "a"}, r"drop must be a list of columns"),
        ({}, {"test": 1.5}, r"test must be a share"),
        ({"a": []}, {}, r"all columns need as many values"),
    ],
)
def test_frames_that_are_wrong_say_where(change: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    columns = {"a": [1, 2, 3, 4, 5], "label": ["a", "b", "a", "b", "a"], **change}
    with pytest.raises(FedadcError, match=words):
        from_frame(columns, **{"label": "label", "test": 0, **settings})
    with pytest.raises(FedadcError, match="rows must be a path, a DataFrame or columns by name, not list"):
        from_frame([[1]], "label")
    with pytest.raises(DataError, match="two columns of the table have the same name"):
        from_frame(pandas.DataFrame([[1, 2]], columns=["a", "a"]), "a")
