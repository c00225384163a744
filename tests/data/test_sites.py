"""A site that has only its own rows gets the samples that a simulation with everybody's rows gives to that client.

Three steps: hold out its own shares, summarize its own training rows, encode all its rows with the merged summary.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedadc.data import Dataset, HeldOut
from fedadc.data.encoding import TableEncoding
from fedadc.data.loaders.csv import csv_table, read_table
from fedadc.data.loaders.table import Table, fit_encoding, own_scales
from fedadc.data.rules import TableRules
from fedadc.data.summaries import TableSummary, merge
from fedadc.errors import FedadcError

HOSPITALS = ("north", "south", "east", "Œst", "5")
HEADER = ["age", "hospital", "blood", "code", "rare", "stage"]
SCALE = {"age": [50.0, 20.0]}
SHARES = HeldOut(0.25, 0.2, seed=11)


def write_table(path: Path, rng: np.random.Generator, labels: dict[str, list[str]]) -> list[list[str]]:
    """Hospitals of unequal size; missing values at some, categories that only one has, codes that look like numbers."""
    rows = []
    for _ in range(300):
        who = HOSPITALS[int(5 * rng.random() ** 1.5)]
        age = "" if who == "north" and rng.random() < 0.3 else f"{rng.uniform(20, 90):.2f}"
        blood = rng.choice(["A", "B", "0", "AB", " ?"]) if who != "5" else "Bombay"
        code = rng.choice(["250", "251.1"]) if who == "5" else rng.choice(["E10", "I10", "J1", "K2", "250"])
        rare = "seen" if who == "east" and rng.random() < 0.1 else rng.choice(["", "no"])
        rows.append([age, who, str(blood), str(code), str(rare), str(rng.choice(labels.get(who, labels["*"])))])
    _write(path, rows)
    return rows


def _write(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([HEADER, *rows])


def summarized(table: Table, as_text: frozenset[str] = frozenset()) -> TableSummary:
    """The second step, at a site."""
    (summary,) = table.summaries(table.split(SHARES).train, as_text)
    return summary


def encoded(table: Table, encoding: TableEncoding) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The third step, at a site: the samples of every split."""
    samples, rows = table.samples(encoding), table.split(SHARES)
    taken = {part: samples.take(getattr(rows, part)) for part in ("train", "validation", "test")}
    return {part: (found.x, found.y) for part, found in taken.items()}


def of_client(data: Dataset, client: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The samples of a client in the simulation."""
    owners = {"train": data.owners, "validation": data.validation_owners, "test": data.test_owners}
    found = {part: samples.take(np.flatnonzero(owners[part] == client)) for part, samples in data.splits().items()}
    return {part: (samples.x, samples.y) for part, samples in found.items()}


LABELS = {
    "texts": {"*": ["II", "I", "III"], "5": ["I", "IV"]},
    "integers": {"*": ["1", "2", "10"], "north": ["+1", "1.0", "2"]},
    "integers at one site": {"*": ["1", "2", "1b"], "north": ["1", "1.", "+1", "2"]},
    "spellings": {"*": ["a b", "C"], "north": ["AB", "c"], "5": ["ab", "01", "1"]},
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("scale", [SCALE, "standard", "per-client", "none"], ids=str)
def test_sites_get_what_the_simulation_gives_them(tmp_path: Path, labels: dict[str, list[str]], scale: Any) -> None:
    rows = write_table(tmp_path / "all.csv", np.random.default_rng(len(str(scale))), labels)
    merges = labels is LABELS["spellings"]
    rules = TableRules.of(scale, merge_names=merges)
    pooled = csv_table(tmp_path / "all.csv", "stage", "hospital", scale=scale, held_out=SHARES, merge_names=merges)
    tables = {}
    for name in sorted(HOSPITALS):
        _write(tmp_path / f"{name}.csv", [row for row in rows if row[1] == name])
        tables[name] = read_table(tmp_path / f"{name}.csv", "stage", "hospital", (), rules)
    merged = merge([summarized(table) for table in tables.values()])
    assert merged.mixed == {"blood", "code"}  # "0" and "250" are categories there
    merged = merge([summarized(table, merged.mixed) for table in tables.values()])
    for name, table in tables.items():
        encoding = fit_encoding(merged, table)
        if scale == "per-client":
            (own,) = table.summaries(table.split(SHARES).train, merged.mixed, sums=True)
            encoding = replace(encoding, scales={name: own_scales(own, encoding)})
            assert pooled.encoding is not None and encoding.scales[name] == pooled.encoding.scales[name]
            assert replace(encoding, scales=pooled.encoding.scales) == pooled.encoding
        assert (encoding == pooled.encoding or scale == "per-client") and encoding.classes == pooled.classes
        alone, simulated = encoded(table, encoding), of_client(pooled, name)
        for part in ("train", "validation", "test"):
            for mine, theirs in zip(alone[part], simulated[part], strict=True):
                assert mine.dtype == theirs.dtype and mine.numpy().tobytes() == theirs.numpy().tobytes()
    held = len(pooled.validation or ()) + len(pooled.test or ())
    assert len(rows) - held == len(pooled.train) == merged.rows and held > 80


@pytest.mark.parametrize("scale", ["standard", "none"])
def test_the_columns_come_from_training_rows_alone(scale: str, tmp_path: Path) -> None:
    """Whatever stands in held-out rows (their labels apart), the training samples and the columns stay the same."""
    rows = write_table(tmp_path / "a.csv", np.random.default_rng(0), LABELS["texts"])
    before = csv_table(tmp_path / "a.csv", "stage", "hospital", scale=scale, held_out=SHARES)
    split = read_table(tmp_path / "a.csv", "stage", "hospital", (), TableRules()).split(SHARES)
    for row in [*split.test, *split.validation]:
        rows[row] = ["", rows[row][1], "new", "another", "?!", rows[row][5]]
    rows[split.test[0]][0] = "1e9"
    _write(tmp_path / "b.csv", rows)
    after = csv_table(tmp_path / "b.csv", "stage", "hospital", scale=scale, held_out=SHARES)
    assert after.encoding == before.encoding and after.notes == before.notes
    assert torch.equal(after.train.x, before.train.x) and torch.equal(after.train.y, before.train.y)
    width = after.encoding.columns[0].width  # type: ignore[union-attr]
    assert width == 2 and after.test is not None and after.test.x[0, 0] > (9.9e8 if scale == "none" else 1e7)
    assert (after.test.x[:, width:] == 0).all()  # categories that do not occur in training


def test_without_a_client_column_too(tmp_path: Path) -> None:
    """A category and a gap that only held-out rows have: no column for them, and the gap is the center."""
    held_out, count = HeldOut(0.25, seed=2), 40
    path = tmp_path / "a.csv"
    split = held_out.rows(np.arange(count) % 2)
    sizes, colors = [str(i) for i in range(count)], ["red", "blue"] * 20
    sizes[split.test[0]], colors[split.test[0]] = "", "green"
    lines = [f"{size},{color},{i % 2}" for i, (size, color) in enumerate(zip(sizes, colors, strict=True))]
    path.write_text("\n".join(["size,color,label", *lines]))
    data = csv_table(path, "label", scale={"size": [5, 2]}, held_out=held_out)
    assert data.input_shape == (3,) and data.test is not None
    assert data.test.x[0].tolist() == [0, 0, 0]
    assert data.train.x[0].tolist() == [(split.train[0] - 5) / 2, *((0, 1) if split.train[0] % 2 == 0 else (1, 0))]


def test_another_hospital_changes_nothing_about_the_rows_of_the_others(tmp_path: Path) -> None:
    rows = write_table(tmp_path / "five.csv", np.random.default_rng(4), LABELS["texts"])
    _write(tmp_path / "four.csv", [row for row in rows if row[1] != "south"])
    five, four = (
        csv_table(tmp_path / f, "stage", "hospital", scale="none", held_out=SHARES) for f in ("five.csv", "four.csv")
    )
    ages = [{part: x[:, 0].tolist() for part, (x, _) in of_client(data, "east").items()} for data in (five, four)]
    assert ages[0] == ages[1]


def test_test_and_validation_rows_of_a_file_do_not_enter_the_encoding(tmp_path: Path) -> None:
    """With a test file, only the validation share is held out, and the file is read with the training columns."""
    write_table(tmp_path / "a.csv", np.random.default_rng(0), LABELS["texts"])
    write_table(tmp_path / "b.csv", np.random.default_rng(1), LABELS["texts"])
    data = csv_table(tmp_path / "a.csv", "stage", "hospital", tmp_path / "b.csv", held_out=replace(SHARES, test=None))
    assert len(data.test or ()) == 300 and 55 <= len(data.validation or ()) <= 60
    assert data.test_owners is not None and set(data.test_owners) == set(HOSPITALS)


def test_a_site_tells_of_a_mistake_in_another_one(tmp_path: Path) -> None:
    for name, label in (("north", "sick"), ("south", "Sick")):
        _write(tmp_path / f"{name}.csv", [["1", name, "A", "E1", "no", label], ["2", name, "B", "E1", "no", "2"]])
    tables = [
        read_table(tmp_path / f"{name}.csv", "stage", "hospital", (), TableRules()) for name in ("north", "south")
    ]
    merged = merge([summarized(table) for table in tables])
    with pytest.raises(FedadcError, match=r"column stage has 'Sick' and 'sick', which differ only in case, blanks or"):
        fit_encoding(merged, tables[0])
