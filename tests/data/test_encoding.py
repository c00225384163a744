"""How numbers are scaled and categories made, against their definitions in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedadc.data import Dataset, HeldOut
from fedadc.data.fitting import standard_constants
from fedadc.data.loaders.csv import csv_table
from fedadc.data.loaders.rows import features_of
from fedadc.data.summaries import ColumnSummary
from fedadc.errors import DataError, FedadcError

SHARES = HeldOut(0.25, seed=3)
CLIENTS = ("b", "a", "c")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Columns of very different ranges, with gaps, over unequal clients; `year` loses digits if Σx² is used."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(300):
        who = CLIENTS[int(3 * rng.random() ** 2)]
        pressure = "NA" if rng.random() < 0.2 else f"{rng.normal(120, 15):.1f}"
        rows.append(f"{rng.integers(0, 4)},{pressure},{1e9 + rng.normal():.4f},7.1,{rng.choice(['x', 'y'])},{who}")
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["kind,pressure,year,same,label,who", *rows]) + "\n")
    return path


def raw(table: Path, **options: Any) -> Dataset:
    return csv_table(table, "label", "who", scale="none", held_out=SHARES, **options)


@pytest.mark.parametrize("scale", ["standard", "per-client"])
def test_scaled_numbers_have_mean_0_and_deviation_1_over_training_rows(scale: str, table: Path) -> None:
    data, plain = csv_table(table, "label", "who", scale=scale, held_out=SHARES), raw(table)
    assert data.owners is not None and data.encoding is not None
    gaps = plain.train.x[:, 2].numpy() > 0
    for name in CLIENTS if scale == "per-client" else [None]:
        rows = np.ones(len(data.train), dtype=bool) if name is None else data.owners == name
        x = data.train.x.numpy().astype(np.float64)[rows]
        for column, own in ((0, rows[rows]), (1, ~gaps[rows]), (3, rows[rows])):
            assert abs(x[own, column].mean()) < 1e-4 and abs(x[own, column].std() - 1) < 1e-4, (name, column)
        assert (x[gaps[rows], 1] == 0).all() and (np.abs(x[:, 4]) < 1e-6).all()  # the center; a constant column
    assert np.array_equal(data.train.x[:, 2].numpy() > 0, gaps)
    assert data.test is not None and abs(float(data.test.x[:, 0].mean())) > 1e-4  # held-out rows did not take part


def test_the_line_in_the_notes_gives_the_same_bits(table: Path) -> None:
    data = csv_table(table, "label", "who", held_out=SHARES)
    (line,) = [note for note in data.notes if "as by scale: " in note]
    constants = yaml.safe_load(line.split("as by ")[1])["scale"]
    assert list(constants) == ["kind", "pressure", "year", "same"] and constants["same"] == [7.1, 1.0]
    again = csv_table(table, "label", "who", scale=constants, held_out=SHARES)
    assert again.train.x.numpy().tobytes() == data.train.x.numpy().tobytes()


def test_constants_are_the_mean_and_the_deviation_to_six_digits_of_the_deviation() -> None:
    rng = np.random.default_rng(1)
    for center, spread in ((0, 1), (1e9, 1), (-5, 1e-7), (3, 1e20), (1e-20, 1e-22)):
        x = rng.normal(center, spread, 1000)
        squares = float(((x - x.mean()) ** 2).sum())
        found = standard_constants(ColumnSummary(1000, sums=(1000, float(x.sum()), squares)))
        assert abs(found[0] - x.mean()) <= 1e-5 * x.std() + 1e-15 * abs(center)
        assert abs(found[1] / x.std() - 1) <= 1e-5 and float(f"{found[1]:.6g}") == found[1]
    assert standard_constants(ColumnSummary(0, sums=(0, 0.0, 0.0))) == (0, 1)


def test_numbers_that_are_categories(table: Path) -> None:
    data = csv_table(table, "label", "who", categories=["kind"], held_out=SHARES)
    assert data.encoding is not None and data.encoding.columns[0].categories == ("0", "1", "2", "3")
    kinds = raw(table).train.x[:, 0].numpy().astype(int)
    assert np.array_equal(data.train.x[:, :4].numpy(), np.eye(4)[kinds])
    columns = {"kind": [2, 2.0, "2", 9], "pressure": [1] * 4, "year": [1e9] * 4, "same": [7.1] * 4}
    assert features_of(columns, data.encoding)[:, :4].tolist() == [[0, 0, 1, 0]] * 3 + [[0] * 4]


def test_new_rows_under_scales_of_the_clients_name_a_client(table: Path) -> None:
    data = csv_table(table, "label", "who", scale="per-client")
    assert data.encoding is not None
    new = {"kind": [1, 1], "pressure": [100, 100], "year": [1e9, 1e9], "same": [7.1, 7.1]}
    x = features_of({**new, "who": ["a", "b"]}, data.encoding)
    center, spread = data.encoding.scales["b"][1]
    assert x[0, 1] != x[1, 1] == np.float32((100 - center) / spread)
    with pytest.raises(DataError, match="the table must name the client of every row: every client has its own scale"):
        features_of(new, data.encoding)
    with pytest.raises(DataError, match="row 3: no scale is known for the client 'z', only for a, b, c"):
        features_of({**new, "who": ["a", "z"]}, data.encoding)
    with pytest.raises(FedadcError, match="per-client needs data that names its clients"):
        csv_table(table, "label", scale="per-client")
