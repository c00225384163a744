"""Data from arrays, torch Datasets, .npz files and image folders is read unchanged, or refused with a clear message."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from fedadc.data import Dataset, Normalization, from_arrays, from_clients, from_images, from_npz, from_torch
from fedadc.data.loaders.arrays import samples_like
from fedadc.data.loaders.images import image_folder
from fedadc.data.loaders.npz import npz
from fedadc.data.loaders.samples import read_samples
from fedadc.data.split import HeldOut
from fedadc.errors import DataError, FedadcError

X = np.random.default_rng(0).normal(size=(6, 3))
Y = np.array([0, 1, 2, 0, 1, 2])


def refused(call: Callable[[], object], *words: str, kind: type[FedadcError] = DataError) -> None:
    """Assert that the call raises this error with a message that contains these words."""
    with pytest.raises(FedadcError) as error:
        call()
    assert error.type is kind
    message = str(error.value)
    assert all(word in message for word in words), message


# Arrays


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(np.uint8, torch.uint8), (np.float64, torch.float64), (np.float32, torch.float32), (np.float16, torch.float32),
     (np.int64, torch.float32), (np.bool_, torch.float32)],
)  # fmt: skip
@pytest.mark.parametrize("as_tensor", [False, True])
def test_dtypes(dtype: type, kept: torch.dtype, as_tensor: bool) -> None:
    x = (np.arange(24).reshape(6, 1, 2, 2) % 2).astype(dtype)
    data = from_arrays(torch.from_numpy(x) if as_tensor else x, Y)
    assert data.train.x.dtype == kept and data.train.y.dtype == torch.int64
    assert np.array_equal(data.train.x.numpy(), x) and data.input_shape == (1, 2, 2)
    assert data.normalization == Normalization(scale=255.0 if dtype is np.uint8 else 1.0)


def test_lists_and_strided_arrays_keep_their_values() -> None:
    assert from_arrays([[1, 2], [3, 4]], [0, 1]).train.x.tolist() == [[1, 2], [3, 4]]
    assert from_arrays(X[::-1, ::-1], Y).train.x.tolist() == X[::-1, ::-1].tolist()
    assert from_arrays(X.T.copy().T, Y).train.x.is_contiguous()


def test_the_data_set_is_a_copy_of_the_array() -> None:
    x = X.copy()
    data = from_arrays(x, Y)
    x[:] = 0
    assert np.array_equal(data.train.x.numpy(), X)


@pytest.mark.parametrize(
    ("labels", "classes", "codes"),
    [
        (["dog", "cat", "dog", "ant", "cat", "ant"], ("ant", "cat", "dog"), [2, 1, 2, 0, 1, 0]),
        ([-1, 1, -1, 1, 1, 1], ("-1", "1"), [0, 1, 0, 1, 1, 1]),
        ([10, 9, 100, 9, 10, 100], ("9", "10", "100"), [1, 0, 2, 0, 1, 2]),  # sorted as numbers, not as text
        ([True, False, True, True, False, True], ("0", "1"), [1, 0, 1, 1, 0, 1]),
        (np.array([3, 3, 4, 4, 3, 4], np.uint8), ("3", "4"), [0, 0, 1, 1, 0, 1]),
        (torch.tensor([5, 6, 5, 6, 5, 6], dtype=torch.int32), ("5", "6"), [0, 1, 0, 1, 0, 1]),
    ],
)
def test_labels_become_classes_and_test_labels_are_mapped_by_name(labels: Any, classes: tuple, codes: list) -> None:
    data = from_arrays(X, labels, (X[:2], labels[1:3]))
    assert data.classes == classes
    assert data.train.y.tolist() == codes
    assert data.test.y.tolist() == codes[1:3] and data.test.y.dtype == torch.int64


def test_integer_labels_are_indices_of_named_classes() -> None:
    samples = samples_like(("ant", "cat", "dog"), X[:3], [2, 0, 1], "more")
    assert samples.y.tolist() == [2, 0, 1]
    refused(lambda: samples_like(("ant", "cat"), X[:3], [2, 0, 1], "more"), "more", "2", "does not occur in training")


def test_owners_and_normalization_are_kept() -> None:
    constants = Normalization(2.0, (0.1,), (0.2,))
    data = from_arrays(X, Y, owners=["b", "a", "b", "a", "a", "c"], name="mine", normalization=constants)
    assert data.owners.tolist() == ["b", "a", "b", "a", "a", "c"]
    assert (data.name, data.normalization) == ("mine", constants)


def with_bad(value: float, at: int) -> np.ndarray:
    x = X.copy()
    x[at, 1] = value
    return x


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_sample_that_is_not_finite_is_named(value: float) -> None:
    refused(lambda: from_arrays(with_bad(value, 4), Y), "training sample 4", "NaN or an infinity at [1]")
    refused(lambda: from_arrays(X, Y, (with_bad(value, 2), Y)), "test sample 2")
    refused(lambda: from_clients([(X, Y), (with_bad(value, 3), Y)]), "client 1's sample 3")


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (X, Y[:5], ["6 inputs do not match 5 labels"]),
        (X, Y + 0.5, ["labels must be integers or strings, not float64"]),
        (X, [None] * 6, ["label of sample 0 is missing (None)"]),
        (X, [[1], [1, 2]], ["labels"]),
        (X, np.eye(6, dtype=int), ["labels must have one dimension, not 2"]),
        (X, torch.zeros(6, dtype=torch.bfloat16), ["labels must be integers or strings"]),
        (X, 3, ["labels must have one dimension, not 0"]),
        (X, np.zeros(6, int), ["fewer than two classes"]),
        (X[:, 0], Y, ["at least one more"]),
        (X + 1j, Y, ["complex"]),
        ([["a", "b"]] * 6, Y, ["must be numbers"]),
        ([[1, 2], [3]], [0, 1], ["must be numbers of one shape"]),
        (np.array([{}, {}]), [0, 1], ["must be numbers"]),
        (np.zeros((0, 3)), np.zeros(0, int), ["no training sample"]),
        (np.zeros((6, 2, 0)), Y, ["samples of shape [2, 0] are empty"]),
        (X, np.array([0, 1, 2, 0, 2**63, 1], np.uint64), ["label of sample 4", "larger than 2^63 - 1"]),
    ],
)
def test_invalid_arrays_are_refused(x: Any, y: Any, words: list[str]) -> None:
    refused(lambda: from_arrays(x, y, name="mine"), "mine", *words)


def test_test_samples_and_owners_must_match() -> None:
    refused(lambda: from_arrays(X, Y, (X[:, :2], Y)), "test samples have shape [2]", "[3]")
    refused(lambda: from_arrays(X, Y, (X, Y[:4])), "6 inputs do not match 4 labels")
    refused(lambda: from_arrays(X, Y, (X, [0, 1, 2, 3, 0, 0])), "3", "does not occur in training")
    refused(lambda: from_arrays(X, ["a", "b"] * 3, (X[:1], ["c"])), "c", "does not occur in training")
    refused(lambda: from_arrays(X, Y, owners=[1, 2]), "2 client ids do not match 6 labels")


@pytest.mark.parametrize(
    ("owners", "words"),
    [
        ([1.0, 2.0, np.nan, 1.0, 2.0, 3.0], ["sample 2 is missing"]),
        (["a", None, "b", "a", "b", "c"], ["numbers or strings, not object"]),
        ([[1], [1, 2]], ["numbers or strings"]),
        (np.zeros((6, 1)), ["6 client ids do not match 6 labels"]),
        (np.array(["2020-01-01"] * 6, "datetime64[D]"), ["not datetime64"]),
    ],
)
def test_invalid_owners_are_refused(owners: Any, words: list[str]) -> None:
    refused(lambda: from_arrays(X, Y, owners=owners, name="mine"), "mine", *words)


def test_owners_may_be_an_object_array_as_in_pandas() -> None:
    assert from_arrays(X, Y, owners=np.array(list("abcabc"), dtype=object)).owners.tolist() == list("abcabc")


# Clients


def test_from_clients_is_a_natural_federation() -> None:
    data = from_clients([(X[:2], Y[:2]), (X[2:], Y[2:])], (X, Y))
    assert np.array_equal(data.train.x.numpy(), X) and data.train.y.tolist() == Y.tolist()
    assert data.owners.tolist() == [0, 0, 1, 1, 1, 1]
    assert len(data.test) == 6 and data.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ((X, Y[:3]), ["client 1 has 6 inputs and 3 labels"]),
        ((X[:0], Y[:0]), ["client 1 has 0 inputs and 0 labels"]),
        ((X[:, :2], Y), ["client 1's inputs are [2]", "client 0's are [3]"]),
        ((X.astype(np.float32), Y), ["client 1", "float32", "float64"]),
        ((X, Y + 0.5), ["labels must be integers or strings"]),
    ],
)
def test_a_client_that_does_not_fit_is_named(second: tuple, words: list[str]) -> None:
    refused(lambda: from_clients([(X, Y), second]), *words)


def test_no_client_is_refused() -> None:
    refused(lambda: from_clients([]), "at least one client", kind=FedadcError)


# torch Datasets


def test_from_torch_reads_every_item() -> None:
    x, y = torch.from_numpy(X).float(), torch.from_numpy(Y)
    data = from_torch(TensorDataset(x, y), TensorDataset(x[:2], y[:2]), owners=[7, 7, 7, 8, 8, 8])
    assert torch.equal(data.train.x, x) and torch.equal(data.train.y, y)
    assert torch.equal(data.test.x, x[:2]) and data.owners.tolist() == [7, 7, 7, 8, 8, 8]


def test_from_torch_takes_any_indexable_of_arrays() -> None:
    data = from_torch([(np.full((2, 2), i, np.uint8), i % 2) for i in range(4)])
    assert data.train.x.dtype == torch.uint8 and data.train.x[:, 0, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "items",
    [
        [],
        [(np.zeros(3), 0), (np.zeros(4), 1)],  # of two shapes
        [(np.zeros(3),), (np.zeros(3),)],  # without labels
        [("text", 0), ("more", 1)],
        [(np.zeros(3), 0.3), (np.zeros(3), 1.7)],  # a regression target is no class
        [(np.zeros(3), None), (np.zeros(3), 1)],
    ],
)
def test_invalid_items_are_refused(items: list) -> None:
    refused(lambda: from_torch(items, name="mine"), "mine")


def test_from_torch_takes_string_labels_as_from_arrays_does() -> None:
    assert from_torch([(np.zeros(3), "dog"), (np.ones(3), "cat")]).classes == ("cat", "dog")


# .npz files


def save(path: Path, compressed: bool = False, **arrays: Any) -> Path:
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("ending", ["", "_train"])
def test_npz_round_trip(tmp_path: Path, compressed: bool, ending: str) -> None:
    arrays = {f"x{ending}": X, f"y{ending}": Y, "x_test": X[:2], "y_test": Y[:2], "client": list("aabbcc")}
    data = npz(save(tmp_path / "my.npz", compressed, **arrays))
    assert data.name == "my.npz" and data.owners.tolist() == list("aabbcc")
    assert np.array_equal(data.train.x.numpy(), X) and np.array_equal(data.test.x.numpy(), X[:2])


def test_npz_without_and_with_a_test_file(tmp_path: Path) -> None:
    path = save(tmp_path / "train.npz", x=X, y=Y)
    assert npz(path).test is None
    for ending in ("", "_test"):
        other = save(tmp_path / f"other{ending}.npz", **{f"x{ending}": X[:3], f"y{ending}": Y[:3]})
        assert len(npz(path, other).test) == 3


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize(
    "array", [X.astype(">f8"), np.asfortranarray(X), X[::-1, ::2]], ids=["big", "fortran", "strides"]
)
def test_npz_with_any_array_layout_and_version(tmp_path: Path, array: np.ndarray, version: tuple[int, int]) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as out:
        for name, content in (("x", array), ("y", Y)):
            with out.open(f"{name}.npy", "w") as stream:
                np.lib.format.write_array(stream, content, version)
    assert np.array_equal(npz(tmp_path / "a.npz").train.x.numpy(), array)


def test_large_uniform_arrays_are_read_only_uncompressed(tmp_path: Path) -> None:
    small, large = np.zeros((6, 10 << 20), np.uint8), np.zeros((6, 12 << 20), np.uint8)  # around 64 MiB in all
    assert npz(save(tmp_path / "small.npz", True, x=small, y=Y)).input_shape == (10 << 20,)
    assert npz(save(tmp_path / "large.npz", False, x=large, y=Y)).input_shape == (12 << 20,)
    refused(lambda: npz(save(tmp_path / "packed.npz", True, x=large, y=Y)), "75 MB of memory", "with np.savez")


def test_npz_without_its_arrays_says_which(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", images=X, y=Y)
    refused(lambda: npz(path), str(path), "x and y or x_train and y_train", "images, y")
    refused(lambda: npz(save(tmp_path / "b.npz", x=X, y=Y), path), str(path), "x_test and y_test")


def test_pickled_objects_are_refused_and_not_run(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x=X, y=np.array(["a", 1, None, 2, 3, 4], dtype=object))
    refused(lambda: npz(path), str(path), "pickled objects are refused")


class Bomb:
    """An object that would create a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("form", ["npz", "pickle"])
def test_no_code_in_a_file_is_run(tmp_path: Path, form: str) -> None:
    bomb = np.array([Bomb(tmp_path / "mark")], dtype=object)
    path = tmp_path / "a.npz"
    if form == "npz":
        save(path, x=X, y=Y, extra=bomb)
    else:
        bomb.dump(path)
    refused(lambda: npz(path), str(path))
    assert not (tmp_path / "mark").exists()


def damaged(path: Path, how: str) -> Path:
    save(path, how != "cut in two", x=np.random.default_rng(0).normal(size=(200, 5)), y=np.arange(200) % 2)
    raw = path.read_bytes()
    content = {
        "cut in two": raw[: len(raw) // 2],
        "overwritten early": raw[:100] + b"\xff" * 40 + raw[140:],
        "overwritten late": raw[:2000] + b"\xff" * 40 + raw[2040:],
        "empty": b"",
        "text": b"x,y\n1,2\n",
    }[how]
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("how", ["cut in two", "overwritten early", "overwritten late", "empty", "text"])
def test_a_damaged_npz_is_refused_with_its_name(tmp_path: Path, how: str) -> None:
    path = damaged(tmp_path / "a.npz", how)
    refused(lambda: npz(path), str(path))


def test_other_files_are_refused_as_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    refused(lambda: npz(tmp_path / "a.npy"), "a.npy", "single array", "x and y")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as other:
        other.writestr("x", "not an array")
        other.writestr("y", "not an array")
    refused(lambda: npz(tmp_path / "b.npz"), "b.npz")
    refused(lambda: npz(tmp_path / "none.npz"), "there is no file", "none.npz")
    refused(lambda: npz(tmp_path), str(tmp_path))


# Folders of images


def image(path: Path, color: bool = False, size: tuple[int, int] = (4, 4), value: int = 100) -> Path:
    """An image of one value (red where it has colors), size = (width, height), without loss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels: Any = (value, 0, 0) if color else value
    Image.new("RGB" if color else "L", size, pixels).save(path)
    return path


def pictures(root: Path, color: dict[str, bool] | None = None) -> Path:
    """Two images each of cats and dogs, with values 10, 11, 20, 21."""
    for k, name in enumerate(["cat", "dog"]):
        for i in range(2):
            image(root / name / f"{i}.png", (color or {}).get(name, False), value=10 * (k + 1) + i)
    return root


@pytest.mark.parametrize(
    ("color", "channels"), [({}, 1), ({"cat": True, "dog": True}, 3), ({"dog": True}, 3)], ids=["gray", "rgb", "mixed"]
)
def test_folder_of_images(tmp_path: Path, color: dict[str, bool], channels: int) -> None:
    data = image_folder(pictures(tmp_path / "pets", color))
    assert data.name == "pets" and data.classes == ("cat", "dog") and data.train.y.tolist() == [0, 0, 1, 1]
    assert data.train.x.shape == (4, channels, 4, 4) and data.train.x.dtype == torch.uint8
    assert data.normalization.scale == 255.0 and data.test is None
    first = data.train.x[:, :, 0, 0].tolist()
    for k, name in enumerate(["cat", "dog"]):
        red = color.get(name, False)
        for i in range(2):
            value = 10 * (k + 1) + i
            assert first[2 * k + i] == ([value, 0, 0] if red else [value] * channels)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_pixel_is_where_it_was(tmp_path: Path, channels: int) -> None:
    """Images of 5 rows and 7 columns, [height, width, channels] in the file, [channels, height, width] in the data."""
    pixels = np.random.default_rng(0).integers(256, size=(2, 5, 7, channels), dtype=np.uint8)
    for name, array in zip("ab", pixels, strict=True):
        (tmp_path / name).mkdir()
        Image.fromarray(array.squeeze()).save(tmp_path / name / "1.png")
    assert np.array_equal(image_folder(tmp_path).train.x.numpy(), pixels.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("color", [{}, {"cat": True}])
def test_train_and_test_folders(tmp_path: Path, color: dict[str, bool]) -> None:
    """Also where one of the two is gray and the other has colors."""
    pictures(tmp_path / "train", color)
    pictures(tmp_path / "test")
    data = image_folder(tmp_path)
    assert len(data.train) == len(data.test) == 4
    assert data.train.x.shape == data.test.x.shape == (4, 3 if color else 1, 4, 4)
    assert data.test.x[:, -1, 0, 0].tolist() == [10, 11, 20, 21]
    apart = image_folder(tmp_path / "train", test=tmp_path / "test")
    assert torch.equal(apart.test.x, data.test.x)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    pictures(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "readme.md").write_text("not a class")
    assert len(image_folder(tmp_path).train) == 4


def test_different_sizes_are_refused_with_the_file_or_scaled(tmp_path: Path) -> None:
    pictures(tmp_path)
    odd = image(tmp_path / "dog" / "wide.png", size=(7, 5), value=99)
    refused(lambda: image_folder(tmp_path), str(odd), "7×5 pixels", "4×4", "size", kind=FedadcError)
    data = image_folder(tmp_path, size=6)
    assert data.input_shape == (1, 6, 6) and (data.train.x[-1] == 99).all()
    refused(lambda: image_folder(tmp_path, size=0), "size must be at least 1", kind=FedadcError)


@pytest.mark.parametrize("damage", ["text", "cut", "empty"])
def test_a_broken_image_is_named(tmp_path: Path, damage: str) -> None:
    pictures(tmp_path)
    broken = tmp_path / "dog" / "broken.png"
    Image.fromarray(np.random.default_rng(0).integers(256, size=(4, 4), dtype=np.uint8)).save(broken)
    raw = broken.read_bytes()
    broken.write_bytes({"text": b"no image", "cut": raw[: len(raw) // 2], "empty": b""}[damage])
    refused(lambda: image_folder(tmp_path), str(broken), "not a readable image")


def test_a_photograph_with_its_thumbnail_is_one_image(tmp_path: Path) -> None:
    """Telephones write such files (MPO) under the name of a JPEG."""
    for name in "ab":
        (tmp_path / name).mkdir()
        photograph, copy = Image.new("RGB", (8, 6), (200, 0, 0)), Image.new("RGB", (4, 3))
        photograph.save(tmp_path / name / "1.jpg", "MPO", save_all=True, append_images=[copy])
    with Image.open(tmp_path / "a" / "1.jpg") as image:
        assert image.format == "MPO" and image.n_frames == 2
    assert image_folder(tmp_path).train.x.shape == (2, 3, 6, 8)


def test_empty_and_absent_folders_are_refused(tmp_path: Path) -> None:
    refused(lambda: image_folder(tmp_path), str(tmp_path), "no images", "one folder of image files per class")
    (tmp_path / "cat").mkdir()
    refused(lambda: image_folder(tmp_path), "no images")
    refused(lambda: image_folder(tmp_path / "none"), "there is no folder", "none")
    image(tmp_path / "cat" / "1.png")
    refused(lambda: image_folder(tmp_path), "fewer than two classes")
    refused(lambda: image_folder(pictures(tmp_path / "x"), test=tmp_path / "none"), "there is no folder")


def test_a_test_folder_with_another_class_is_refused(tmp_path: Path) -> None:
    pictures(tmp_path / "train")
    image(tmp_path / "test" / "bird" / "1.png")
    refused(lambda: image_folder(tmp_path), "bird", "does not occur in training")


def test_sixteen_bit_gray_is_scaled_to_eight(tmp_path: Path) -> None:
    """The upper byte of every pixel: a picture must not turn white."""
    for name, value in (("cat", 0x2000), ("dog", 0x8000)):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((4, 4), value, np.uint16)).save(tmp_path / name / "1.png")
    assert image_folder(tmp_path).train.x[:, 0, 0, 0].tolist() == [0x20, 0x80]


# More samples for a trained model


def test_read_samples_from_npz_and_folder(tmp_path: Path) -> None:
    like = image_folder(pictures(tmp_path / "pets"))
    image(tmp_path / "more" / "dog" / "large.png", size=(9, 9), value=77)
    samples = read_samples(tmp_path / "more", like)
    assert samples.x.shape == (1, 1, 4, 4) and (samples.x == 77).all() and samples.y.tolist() == [1]
    path = save(tmp_path / "more.npz", x=like.train.x.numpy(), y=["dog", "cat", "dog", "cat"])
    assert read_samples(path, like).y.tolist() == [1, 0, 1, 0]
    refused(lambda: read_samples(tmp_path / "none.npz", like), "there is no file")
    refused(lambda: read_samples(save(tmp_path / "other.npz", x=X, y=["bird"] * 6), like), "bird")


def shaped(channels: int, height: int, width: int) -> Dataset:
    return from_arrays(np.zeros((2, channels, height, width), np.uint8), ["cat", "dog"])


@pytest.mark.parametrize(
    ("shape", "color"), [((1, 4, 4), False), ((3, 4, 4), True), ((3, 4, 4), False), ((1, 4, 6), False)]
)
def test_read_samples_have_the_shape_of_the_data_set(tmp_path: Path, shape: tuple[int, int, int], color: bool) -> None:
    """Gray images are accepted for a model trained on colors (as in `image_folder`); images need not be square."""
    image(tmp_path / "cat" / "1.png", color, size=(shape[2], shape[1]))
    assert tuple(read_samples(tmp_path, shaped(*shape)).x.shape[1:]) == shape


def test_images_with_the_channels_last_are_refused() -> None:
    with pytest.raises(FedadcError, match=r"pass them as \[channels, height, width\]"):
        from_arrays(np.zeros((6, 8, 8, 3), dtype=np.uint8), np.arange(6) % 2)


def test_an_empty_class_folder_is_named(tmp_path: Path) -> None:
    for name in ("cat", "dog", "owl"):
        (tmp_path / name).mkdir()
    for name in ("cat", "dog"):
        Image.fromarray(np.zeros((4, 4), dtype=np.uint8)).save(tmp_path / name / "1.png")
    with pytest.raises(FedadcError, match="owl contains no images"):
        image_folder(tmp_path)


def test_a_test_sample_may_name_its_client(tmp_path: Path) -> None:
    """In arrays, in an .npz file and in one pair per client; a held-out share keeps the owners of its samples."""
    x, y = np.arange(24.0).reshape(12, 2), np.arange(12) % 2
    held, who = (np.ones((3, 2)), np.array([1, 0, 1])), np.array(["b", "a", "a"])
    assert from_arrays(x, y, held, test_owners=who).test_owners.tolist() == ["b", "a", "a"]  # type: ignore[union-attr]
    np.savez(tmp_path / "a.npz", x=x, y=y, client=y, x_test=held[0], y_test=held[1], client_test=who)
    np.savez(tmp_path / "b.npz", x=held[0], y=held[1], client=who[::-1])
    assert npz(tmp_path / "a.npz").test_owners.tolist() == ["b", "a", "a"]  # type: ignore[union-attr]
    assert npz(tmp_path / "a.npz", tmp_path / "b.npz").test_owners.tolist() == ["a", "a", "b"]  # type: ignore[union-attr]
    data = from_clients([(x, y), (x, y)], tests=[(x[:1], y[:1]), (x[:2], y[:2])])
    assert data.test_owners is not None and data.test_owners.tolist() == [0, 1, 1] and data.test is not None
    assert data.test.y.tolist() == [0, 0, 1]
    natural = from_arrays(x, y, owners=np.array(["p", "q", "r"])[(x[:, 0] // 8).astype(int)])
    split = HeldOut(test=0.5, seed=1)(natural)
    assert split.test is not None and split.test_owners is not None and split.owners is not None
    assert split.test_owners.tolist() == ["pqr"[int(v // 8)] for v in split.test.x[:, 0]]
    assert HeldOut(validation=0.5, seed=1)(natural).test_owners is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x, y: from_arrays(x, y, (x, y), test_owners=[1, 2]), "2 client ids do not match 4 labels"),
        (lambda x, y: from_arrays(x, y, test_owners=[1, 2]), "2 client ids do not match 0 labels"),
        (lambda x, y: from_clients([(x, y)], (x, y), tests=[(x, y)]), "(one pair for all clients) or `tests`"),
        (lambda x, y: from_clients([(x, y)], tests=[]), "0 test pairs for 1 clients"),
        (lambda x, y: from_clients([(x, y)] * 2, tests=[(x, y), (x[:, :1], y)]), "client 1's test inputs are [1]"),
    ],
)
def test_test_owners_that_do_not_fit_are_refused(make: Any, words: str) -> None:
    kind = FedadcError if "pair" in words else DataError  # wrong arguments, or data that does not fit
    refused(lambda: make(np.ones((4, 2)), np.arange(4) % 2), words, kind=kind)


def test_a_data_set_checks_the_owners_of_every_split() -> None:
    data = from_arrays(X, Y, (X, Y), owners=range(6), test_owners=range(6))
    assert replace(data, validation=data.train, validation_owners=np.arange(6)).validation_owners is not None
    refused(lambda: replace(data, owners=np.arange(5)), "owners must hold one client id per train sample", "5 for 6")
    refused(lambda: replace(data, test_owners=np.arange(7)), "test_owners must hold", "7 for 6")
    refused(lambda: replace(data, test=None), "test_owners must hold", "6 for 0")
    refused(lambda: replace(data, validation_owners=np.arange(6)), "validation_owners must hold", "6 for 0")


def test_from_npz_and_from_images_take_a_file_or_a_share(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=np.arange(6) % 2)
    assert from_npz(str(tmp_path / "a.npz")).test is None
    assert len(from_npz(tmp_path / "a.npz", test=tmp_path / "a.npz").test or ()) == 6
    expected = HeldOut(0.4, seed=3)(npz(tmp_path / "a.npz"))
    found = from_npz(tmp_path / "a.npz", test=0.4, seed=3)
    assert found.test is not None and expected.test is not None and torch.equal(found.test.x, expected.test.x)
    pets = pictures(tmp_path / "pets")
    assert len(from_images(str(pets), test=str(pets)).test or ()) == len(from_images(pets).train) == 4
    assert from_images(pets, test=0.5, size=6).spec.input_shape[1:] == (6, 6)
    assert len(from_images(pets, validation=0.5).validation or ()) == 2


def test_from_npz_and_from_images_name_the_argument_that_is_wrong(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y, x_test=X, y_test=Y)
    refused(lambda: from_npz(tmp_path / "a.npz", test=0.5), "already has test data; remove test", kind=FedadcError)
    refused(lambda: from_npz(3), "path must be a path, not 3", kind=FedadcError)  # type: ignore[arg-type]
    refused(lambda: from_images(tmp_path / "none"), "path: there is no folder")
    refused(
        lambda: from_images(pictures(tmp_path / "pets"), size=0), "size must be at least 1, not 0", kind=FedadcError
    )


@pytest.mark.parametrize("labels", [[[0, 1], [1, 7]], [["b", "a"], ["c", "a"]], [[1, 0], ["x", "1"]]])
def test_the_classes_are_those_of_all_clients_sorted(labels: list[list[Any]]) -> None:
    """Held-out samples take no part and need none: a client keeps a training sample of each of its classes."""
    pairs = [(np.repeat(X[:2], 5, axis=0), [label for label in own for _ in range(5)]) for own in labels]
    data = HeldOut(0.4)(from_clients(pairs))
    merged = sorted({str(label) for own in labels for label in own})
    assert data.classes == tuple(merged)
    for client, own in enumerate(labels):
        kept = data.train.y[torch.from_numpy(np.asarray(data.owners) == client)]
        assert {data.classes[y] for y in kept.tolist()} == {str(label) for label in own}
