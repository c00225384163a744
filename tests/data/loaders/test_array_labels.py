"""Labels from Python are read as those of a table: nothing missing, one name for a class, no quantities as classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedadc.data import from_arrays, from_clients, from_images, from_npz, from_torch
from fedadc.errors import FedadcError

WRONG: dict[str, tuple[Any, str]] = {
    "NA": (["a", "NA", "b", "a"], "label of sample 1 is missing"),
    "None": (["a", "b", None, "a"], "label of sample 2 is missing"),
    "NaN among texts": (np.array(["a", "b", "a", float("nan")], dtype=object), "label of sample 3 is missing"),
    "NaN": ([0.0, 1.0, float("nan"), 1.0], "label of sample 2 is missing"),
    "case": (["sick", "Sick", "well", "sick"], "'Sick' and 'sick', which differ only in case"),
    "decimals": ([0.5, 1.0, 0.5, 1.0], "set task to regression"),
}


@pytest.mark.parametrize(("y", "words"), WRONG.values(), ids=WRONG)
def test_wrong_labels_are_named(y: Any, words: str) -> None:
    x = np.zeros((4, 2))
    with pytest.raises(FedadcError, match=words):
        from_arrays(x, y)
    with pytest.raises(FedadcError, match=words):
        from_clients([(x, y), (x, ["a", "b", "a", "b"] if isinstance(y[0], str) else [0, 1, 0, 1])])
    with pytest.raises(FedadcError, match=words):
        from_torch(list(zip(x.tolist(), y, strict=True)))


def test_quantities_are_no_classes(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    x, y = np.zeros((500, 2)), rng.integers(100, 900, size=500)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    for load in (lambda: from_arrays(x, y), lambda: from_npz(tmp_path / "a.npz")):
        with pytest.raises(FedadcError, match=r"a number with \d+ values from 1\d\d to 8\d\d; set task: regression"):
            load()
    assert len(from_arrays(x, y, task="classification").classes) == len(np.unique(y))
    assert len(from_arrays(x, np.arange(500) % 100).classes) == 100, "numbers of classes count from 0"


def test_names_are_merged_if_that_is_asked_for() -> None:
    data = from_arrays(np.zeros((4, 2)), ["sick", "Sick", "well", "sick"], merge_names=True)
    assert data.classes == ("Sick", "well") and data.train.y.tolist() == [0, 0, 1, 0]
    kept = from_arrays(np.zeros((3, 2)), ["none", "some", "none"], missing=["unknown"])
    assert kept.classes == ("none", "some")


def test_whole_numbers_may_be_floats() -> None:
    assert from_arrays(np.zeros((3, 2)), [2.0, 0.0, 2.0]).classes == ("0", "2")


def test_a_folder_of_images_may_be_called_none(tmp_path: Any) -> None:
    for name in ("none", "some"):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.fromarray(np.full((8, 8), 9 * i, dtype=np.uint8)).save(tmp_path / name / f"{i}.png")
    assert from_images(tmp_path).classes == ("none", "some")


def test_inputs_far_from_one_are_remarked_on() -> None:
    x = np.random.default_rng(0).normal(size=(6, 3)) * [1, 1e5, 1]
    (note,) = from_arrays(x, [0, 1] * 3).notes
    assert note.startswith("feature 1 has values up to") and "not scaled" in note
    assert not from_arrays(x / 1e5, [0, 1] * 3).notes
    assert not from_arrays(np.arange(18).reshape(6, 3) * 100, [0, 1] * 3).notes, "they may be indices of an embedding"
