"""Tables with numbers to predict: which columns are labels, what they become, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedadc
from fedadc.data import from_csv
from fedadc.errors import FedadcError

HEADER = "town,area,price,rent\n"


def table(path: Path, rows: int = 80, **changed: str) -> Path:
    """A table of flats; `changed` are fields of the fourth row."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(rows):
        area = rng.uniform(40, 200)
        row = {"town": "ab"[i % 2], "area": f"{area:.1f}", "price": f"{8000 * area:.0f}", "rent": f"{20 * area:.2f}"}
        lines.append(",".join((row | changed if i == 3 else row).values()))
    path.write_text(HEADER + "\n".join(lines) + "\n")
    return path


def test_the_label_columns_are_numbers(tmp_path: Path) -> None:
    data = from_csv(table(tmp_path / "t.csv"), ["price", "rent"], "town", task="regression", test=0.25)
    assert data.input_shape == (1,) and [target.name for target in data.targets] == ["price", "rent"]
    prices = data.train.y[:, 0].numpy()
    assert data.targets[0].center == pytest.approx(prices.mean(), rel=1e-4)
    assert data.targets[0].spread == pytest.approx(prices.std(), rel=1e-5)
    assert len(data.train) == 60 and any("price: to be predicted" in note for note in data.notes)


def test_given_constants_are_used(tmp_path: Path) -> None:
    scale = {"price": (1e6, 1e5), "area": (100, 50)}
    data = from_csv(table(tmp_path / "t.csv"), "price", task="regression", drop=["rent", "town"], scale=scale)
    assert (data.targets[0].center, data.targets[0].spread) == (1e6, 1e5)


REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "a missing label": ({"price": "NA"}, {}, "row 5, column price: the label is missing"),
    "a text": ({"price": "cheap"}, {}, "row 5, column price: 'cheap' is not a number"),
    "two labels of classes": ({}, {"label": ["price", "rent"], "task": None}, "label names 2 columns"),
    "twice": ({}, {"label": ["price", "price"]}, "label must name different columns"),
    "no such column": ({}, {"label": ["price", "sice"]}, "column 'sice' is unknown"),
    "classes": ({}, {"task": None}, "set task: regression"),
}


@pytest.mark.parametrize(("changed", "settings", "words"), REFUSED.values(), ids=REFUSED)
def test_wrong_labels_are_named(tmp_path: Path, changed: dict[str, str], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FedadcError, match=words):
        from_csv(table(tmp_path / "t.csv", **changed), **{"label": "price", "task": "regression", **settings})


def test_from_a_table_to_predictions(tmp_path: Path) -> None:
    table(tmp_path / "t.csv")
    node = {"name": "csv", "path": str(tmp_path / "t.csv"), "label": "price", "client": "town", "drop": ["rent"]}
    config = {"rounds": 10, "task": "regression", "data": node, "model": "mlp", "local": {"epochs": 2, "batch_size": 8}}
    result = fedadc.run(config, out=tmp_path / "run")
    assert result.history[-1]["test_r2"] > 0.95
    (tmp_path / "new.csv").write_text("area\n50\n150\n")
    small, large = fedadc.load(tmp_path / "run").predict(tmp_path / "new.csv").values[:, 0]
    assert 250_000 < small < 550_000 and 1_000_000 < large < 1_400_000
