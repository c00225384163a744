"""What is probably a mistake is said; what is not, is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import fedadc
from fedadc.data import Dataset, Samples
from fedadc.data.loaders.csv import csv_table
from fedadc.data.loaders.images import image_folder
from fedadc.data.remarks import about_clients, about_sizes, about_test_rows
from fedadc.data.split import HeldOut

ROWS = 300


def notes_of(columns: dict[str, list[Any]], folder: Path) -> str:
    rng = np.random.default_rng(0)
    path = folder / "t.csv"
    full = {**columns, "x": rng.normal(size=ROWS).round(3).tolist(), "label": rng.choice(["a", "b"], ROWS).tolist()}
    rows = [",".join(map(str, row)) for row in zip(*full.values(), strict=True)]
    path.write_text("\n".join([",".join(full), *rows]))
    return "\n".join(csv_table(path, "label", held_out=HeldOut(0.2)).notes)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([f"p{k}" for k in range(ROWS)], "c has another value in every row, as identifiers do: leave it out with drop"),
        ([7 * k + 1 for k in range(ROWS)], "c has another value in every row"),
        ([f"2024-{k % 12 + 1:02}-{k % 25 + 1:02}" for k in range(ROWS)], "c has dates, which become"),
        ([f"{k % 25 + 1}.{k % 12 + 1}.2024" for k in range(ROWS)], "c has dates, which become"),
        ([f"complains of {k % 150}" for k in range(ROWS)], "features, one for each text: group the texts"),
        (
            [f'"{k},5"' for k in range(ROWS)],
            "c has texts that look like numbers, such as '0,5', which become 240 categories",
        ),
        ([f'"1.{k % 9}00,25"' for k in range(ROWS)], "look like numbers, such as '1.000,25'"),
        ([f"{k % 40} kg" for k in range(ROWS)], "write them with a decimal point and without units"),
        ([f"{k % 40}.5 %" for k in range(ROWS)], "look like numbers"),
        ([7.5] * ROWS, "c is the same in all training rows, so nothing can be learned from it: leave it out"),
        (["NA"] * ROWS, "c is the same in all training rows"),
        (["red"] * ROWS, "c is the same in all training rows"),
        ([["red", "NA"][k % 2] for k in range(ROWS)], ""),
        (
            [["Male", "male", "other"][k % 3] for k in range(ROWS)],
            "c has 'Male' and 'male', which become two categories",
        ),
        ([f"{k % 9}th" for k in range(ROWS)], ""),
        ([k + 0.5 for k in range(ROWS)], ""),
        ([k % 290 for k in range(ROWS)], ""),
        (["abcdefghij"[k % 10] for k in range(ROWS)], ""),
    ],
)
def test_columns(column: list[Any], words: str, tmp_path: Path) -> None:
    notes = notes_of({"c": column}, tmp_path)
    if words:
        assert words in notes
    else:
        assert not any(word in notes for word in ("identifiers", "dates", "one for each text", "look like", "the same"))


def test_names_of_columns_can_be_pasted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    names = ['"age, years"', "", "no", "plain one", '"kind\nof"', "Größe"]
    lines = [",".join([*(str(k * (j + 2) % 17) for j in range(len(names))), "ab"[k % 2]]) for k in range(40)]
    path.write_text("\n".join([",".join([*names, "label"]), *lines]))
    notes = csv_table(path, "label").notes
    assert all(note.isprintable() for note in notes)
    (line,) = (note.partition(" as by scale: ")[2] for note in notes if " as by scale: " in note)
    scale = yaml.safe_load(line)
    assert [*scale] == ["age, years", "", "no", "plain one", "kind\nof", "Größe"]
    again = csv_table(path, "label", scale=scale)
    assert torch.equal(again.train.x, csv_table(path, "label").train.x)


def test_rows_that_were_trained_on(tmp_path: Path) -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32))
    y = torch.arange(100) % 2
    train = Samples(x[:60], y[:60])
    for many, said in ((0, False), (2, False), (3, True), (40, True)):
        test = Samples(torch.cat([x[:many], x[60 : 100 - many]]), torch.cat([y[:many], y[60 : 100 - many]]))
        notes = about_test_rows(Dataset("d", train, ("a", "b"), test))
        assert notes == [f"{many} of the 40 test rows are also training rows: figures on them may be too high"] * said
    assert not about_test_rows(Dataset("d", train, ("a", "b"), Samples(x[:40], 1 - y[:40])))  # other labels
    path = tmp_path / "t.csv"
    path.write_text("a,label\n" + "".join(f"{k / 7},{k % 2}\n" for k in range(50)))
    assert "50 of the 50 test rows are also" in "\n".join(csv_table(path, "label", test=path).notes)


def test_clients() -> None:
    owners = np.array(["p", "p", "q", "q", "q"])
    samples = Samples(torch.zeros(5, 1), torch.tensor([0, 1, 0, 2, 0]))
    data = Dataset("d", samples, ("a", "b", "c"), owners=owners)
    assert about_clients(data) == ["only client p has the class b", "only client q has the class c"]
    assert not about_sizes(["p", "q"], np.array([10, 199]))
    (note,) = about_sizes(["p", "q"], np.array([10, 200]))
    assert note.startswith("clients have 10 (p) to 200 (q) training samples and count alike: cohort.weighting: samples")


def test_a_federation_says_it_unless_the_setting_is_made() -> None:
    rng = np.random.default_rng(0)
    pairs = {name: (rng.normal(size=(n, 2)), np.arange(n) % 2) for name, n in (("p", 4), ("q", 100))}
    data = fedadc.from_clients(pairs)
    for weighting, said in (("uniform", True), ("samples", False)):
        federation = fedadc.Federation(model=torch.nn.Linear(2, 2).double(), data=data, weighting=weighting, test=0)
        assert any("count alike" in note for note in federation.notes) == said


def test_files_that_are_no_images_are_named(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for k in range(2):
            Image.fromarray(np.full((4, 4), 60 * k, np.uint8)).save(tmp_path / name / f"{k}.png")
    assert image_folder(tmp_path).notes == ()
    (tmp_path / "cat" / ".DS_Store").touch()
    (tmp_path / "cat" / "scan.dcm").touch()
    assert image_folder(tmp_path).notes == (f"1 file was skipped, as no image of a class: {Path('cat/scan.dcm')}",)
    for k in range(6):
        (tmp_path / f"{k}.png").touch()
    (note,) = image_folder(tmp_path).notes
    assert note.startswith("7 files were skipped, as no image of a class: 0.png, 1.png") and note.endswith("2 more")
