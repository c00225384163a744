"""The built-in data sets: files are read exactly, and an invalid file is refused with its name."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedadc.data import Dataset
from fedadc.data.loaders import builtin
from fedadc.data.loaders import download as files
from fedadc.data.loaders.builtin import cifar10, cifar100, digits, fashion_mnist, mnist, read_cifar, read_idx
from fedadc.errors import FedadcError

IDX_FILES = list(files.SOURCES["mnist"].files)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No data anywhere: an empty cache folder, no FEDADC_DATA. Returns the cache folder."""
    monkeypatch.delenv("FEDADC_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedadc"


def idx(array: np.ndarray) -> bytes:
    """The IDX format: two zero bytes, type 8 (unsigned bytes), the number of dimensions, their sizes, the bytes."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, train: int = 12, test: int = 5, zipped: bool = True, **replaced: np.ndarray) -> dict:
    """A small MNIST in `folder`; `replaced` overrides one of the four arrays."""
    rng = np.random.default_rng(0)
    arrays = {
        "train_x": rng.integers(256, size=(train, 28, 28)),
        "train_y": np.arange(train) % 10,
        "test_x": rng.integers(256, size=(test, 28, 28)),
        "test_y": np.arange(test) % 10,
    } | replaced
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(IDX_FILES, arrays.values(), strict=True):
        content = idx(array)
        (folder / (name if zipped else name[:-3])).write_bytes(gzip.compress(content) if zipped else content)
    return arrays


def test_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    theirs, ours = datasets.load_digits(), digits()
    assert np.array_equal(ours.train.x.numpy().reshape(-1, 8, 8), theirs.images)
    assert np.array_equal(ours.train.y.numpy(), theirs.target)
    assert ours.input_shape == (1, 8, 8) and ours.classes == tuple(map(str, theirs.target_names))
    assert ours.normalization.scale == theirs.images.max() == 16


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_idx_round_trip(tmp_path_factory: pytest.TempPathFactory, shape: list[int], zipped: bool) -> None:
    array = np.random.default_rng(1).integers(256, size=shape).astype(np.uint8)
    path = tmp_path_factory.mktemp("idx") / ("a.gz" if zipped else "a")
    path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    assert np.array_equal(read_idx(path), array)


GOOD = idx(np.arange(24).reshape(2, 3, 4))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an IDX file"),
        (GOOD[:3], "not an IDX file"),
        (b"\x00\x00\x0d\x03" + GOOD[4:], "not an IDX file of unsigned bytes"),  # floats
        (b"PK\x03\x04" + GOOD[4:], "not an IDX file"),
        (GOOD[:9], "ends inside its header"),
        (GOOD[:-1], "2 × 3 × 4 bytes after its header, but contains 23"),
        (GOOD[:16], "2 × 3 × 4 bytes after its header, but contains 0"),
        (GOOD + b"x", "but contains more"),
        (GOOD[:4] + bytes(4) + b"\xff" * 8, "is empty"),  # 0 × 2^64 bytes, which NumPy cannot count
        (GOOD[:4] + b"\xff" * 12, ""),  # declares 2^96 bytes; the message differs between zipped and plain files
    ],
)
def test_damaged_idx_is_refused_with_its_name(tmp_path: Path, content: bytes, words: str, zipped: bool) -> None:
    path = tmp_path / ("broken.gz" if zipped else "broken")
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(FedadcError) as error:
        read_idx(path)
    assert str(path) in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("damage", ["truncated", "not gzip", "flipped"])
def test_damaged_gzip_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    zipped = gzip.compress(idx(np.random.default_rng(0).integers(256, size=(5, 28, 28))))
    middle = len(zipped) // 2
    content = {
        "truncated": zipped[:-100],
        "not gzip": b"not a gzip file at all",
        "flipped": zipped[:middle] + bytes(255 - b for b in zipped[middle : middle + 50]) + zipped[middle + 50 :],
    }[damage]
    (tmp_path / "x.gz").write_bytes(content)
    with pytest.raises(FedadcError, match=r"x\.gz"):
        read_idx(tmp_path / "x.gz")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("loader", "folder"), [(mnist, "mnist"), (mnist, "MNIST/raw"), (fashion_mnist, "FashionMNIST/raw")]
)
def test_mnist_is_read_from_its_usual_folders(nowhere: Path, tmp_path: Path, loader, folder: str, zipped: bool) -> None:
    arrays = write_idx(tmp_path / folder, zipped=zipped)
    torch.set_warn_always(True)  # torch warns of read-only memory once per process; nothing may reach the user
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data = loader(data_dir=tmp_path)
    finally:
        torch.set_warn_always(False)
    assert data.input_shape == (1, 28, 28) and len(data.classes) == 10
    assert np.array_equal(data.train.x[:, 0].numpy(), arrays["train_x"])
    assert np.array_equal(data.test.x[:, 0].numpy(), arrays["test_x"])
    assert data.train.y.tolist() == arrays["train_y"].tolist() and data.test.y.tolist() == arrays["test_y"].tolist()


@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        ({"train_y": np.array([0, 1, 10] + [0] * 9)}, "label 10 of train sample 2 is outside 0..9"),
        ({"test_y": np.array([0, 1, 2, 3, 255])}, "label 255 of test sample 4"),
        ({"train_y": np.arange(11) % 10}, "12 inputs do not match 11 labels"),
        ({"train_x": np.zeros((12, 784))}, "images must have 3 dimensions"),
        ({"test_x": np.zeros((5, 14, 14))}, "[1, 14, 14]"),
        (
            {"train_x": np.zeros((0, 28, 28)), "train_y": np.zeros(0)},
            "is empty: its header declares 0 × 28",
        ),
    ],
)
def test_inconsistent_mnist_files_are_refused(nowhere: Path, tmp_path: Path, replaced: dict, words: str) -> None:
    write_idx(tmp_path / "mnist", **replaced)
    with pytest.raises(FedadcError) as error:
        mnist(data_dir=tmp_path)
    assert words in str(error.value)


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifar_round_trip(tmp_path: Path, label_bytes: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(256, size=(7, 3, 32, 32), dtype=np.uint8), rng.integers(100, size=(7, label_bytes))
    path = tmp_path / "part.bin"
    path.write_bytes(b"".join(bytes(b.tolist()) + a.tobytes() for a, b in zip(x, y, strict=True)))
    images, labels = read_cifar(path, label_bytes, 100)
    assert np.array_equal(images, x)
    assert np.array_equal(labels, y[:, -1])  # of a coarse and a fine label the fine one counts


@pytest.mark.parametrize("size", [0, 1, 3073 - 1, 3073 + 1, 2 * 3073 - 5])
def test_a_truncated_cifar_file_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "part.bin").write_bytes(bytes(size))
    with pytest.raises(FedadcError, match=rf"part\.bin is not a CIFAR binary file: its size, {size} bytes"):
        read_cifar(tmp_path / "part.bin", 1, 10)


def write_cifar(folder: Path, name: str, records: int = 20) -> dict[str, str]:
    """Files under the names of a CIFAR set, and their md5s. Labels count up, pixels are the file's number."""
    folder.mkdir(parents=True, exist_ok=True)
    label_bytes, classes = (1, 10) if name == "cifar10" else (2, 100)
    found = {}
    for number, file in enumerate(files.SOURCES[name].files):
        content = b"".join(
            bytes([0] * (label_bytes - 1) + [i % classes]) + bytes([number]) * 3072 for i in range(records)
        )
        (folder / file).write_bytes(content)
        found[file] = hashlib.md5(content).hexdigest()
    return found


@pytest.mark.parametrize("loader", [cifar10, cifar100])
def test_cifar_with_another_md5_is_refused_with_its_name(nowhere: Path, tmp_path: Path, loader) -> None:
    source = files.SOURCES[loader.__name__]
    write_cifar(tmp_path / source.folder, loader.__name__)
    first = next(iter(source.files))
    with pytest.raises(FedadcError, match="md5") as error:
        loader(data_dir=tmp_path)
    assert str(tmp_path / source.folder / first) in str(error.value)


@pytest.mark.parametrize("loader", [cifar10, cifar100])
def test_cifar_files_are_assigned_to_the_right_split(
    nowhere: Path, tmp_path: Path, loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files under the official names, with their md5s entered in the table of sources."""
    name = loader.__name__
    source = files.SOURCES[name]
    monkeypatch.setitem(builtin.SOURCES, name, replace(source, files=write_cifar(tmp_path / source.folder, name)))
    if name == "cifar100":
        (tmp_path / source.folder / "fine_label_names.txt").write_text("\n".join(f"name{i}" for i in range(100)))
    data = loader(data_dir=tmp_path)
    last = len(source.files) - 1  # the test file is the last one
    assert set(data.test.x.unique().tolist()) == {last}
    assert set(data.train.x.unique().tolist()) == set(range(last))
    assert data.test.y.tolist() == [i % len(data.classes) for i in range(20)]
    assert len(data.train) == 20 * last and len(data.classes) == (10 if name == "cifar10" else 100)
    assert data.classes[7] == ("horse" if name == "cifar10" else "name7")


@pytest.mark.parametrize("loader", [mnist, fashion_mnist, cifar10, cifar100])
def test_absent_data_says_what_to_put_where(nowhere: Path, tmp_path: Path, loader) -> None:
    source = files.SOURCES[loader.__name__]
    for given_dir, expected in ((None, nowhere), (tmp_path / "mine", tmp_path / "mine")):
        with pytest.raises(FedadcError) as error:
            loader(data_dir=given_dir)
        message = str(error.value)
        assert str(expected / source.folder) in message and str(nowhere) in message
        assert all(file in message for file in source.files)
        assert f"fedadc data get {loader.__name__}" in message


def test_a_set_that_lacks_one_file_is_absent(nowhere: Path, tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    (tmp_path / "mnist" / IDX_FILES[3]).unlink()
    with pytest.raises(FedadcError, match="not on this machine"):
        mnist(data_dir=tmp_path)


def test_data_dir_comes_before_fedadc_data_before_the_cache(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDADC_DATA", str(tmp_path / "env"))
    sizes = {nowhere: 11, tmp_path / "env": 12, tmp_path / "given": 13}
    for root, train in sizes.items():  # each folder takes precedence over the ones before
        write_idx(root / "mnist", train=train)
        assert len(mnist(data_dir=tmp_path / "given").train) == train
    assert len(mnist(data_dir=None).train) == 12
    monkeypatch.delenv("FEDADC_DATA")
    assert len(mnist(data_dir=None).train) == 11


def real(loader) -> Dataset:
    if not os.environ.get("FEDADC_DATA"):
        pytest.skip("FEDADC_DATA is not set")
    return loader(data_dir=None)


@pytest.mark.realdata
@pytest.mark.parametrize(("loader", "classes"), [(cifar10, 10), (cifar100, 100)])
def test_the_real_cifar(loader, classes: int) -> None:
    data = real(loader)
    assert data.train.x.shape == (50_000, 3, 32, 32) and data.test.x.shape == (10_000, 3, 32, 32)
    assert np.bincount(data.train.y).tolist() == [50_000 // classes] * classes
    assert np.bincount(data.test.y).tolist() == [10_000 // classes] * classes
    assert len(data.classes) == len(set(data.classes)) == classes
    pixels = data.train.x.numpy() / np.float32(255)
    assert np.abs(pixels.mean(axis=(0, 2, 3), dtype=np.float64) - data.normalization.mean).max() < 0.01
    assert np.abs(pixels.std(axis=(0, 2, 3), dtype=np.float64) - data.normalization.std).max() < 0.01
