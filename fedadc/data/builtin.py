"""The built-in data sets: digits (in the package), MNIST, Fashion-MNIST (IDX files), CIFAR-10, CIFAR-100 (binary).

digits: the 1,797 handwritten digits of 8×8 pixels that scikit-learn ships (E. Alpaydin and C. Kaynak, Optical
Recognition of Handwritten Digits, UCI Machine Learning Repository, CC BY 4.0).
"""

from __future__ import annotations

import gzip
import math
import zlib
from importlib.resources import files as package_files
from pathlib import Path

import numpy as np
import torch

from fedadc.data.dataset import Array, Dataset, Normalisation, Samples
from fedadc.data.files import SOURCES, check_md5, find, locate
from fedadc.errors import FedadcError, require

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
DIGIT_CLASSES = tuple("0123456789")


def digits() -> Dataset:
    """scikit-learn's handwritten digits, 8×8; no test part of its own"""
    with package_files("fedadc.data").joinpath("digits.npz").open("rb") as stream, np.load(stream) as arrays:
        samples = _samples(arrays["x"], arrays["y"])
    return Dataset("digits", samples, DIGIT_CLASSES, normalisation=Normalisation(scale=16.0))


def mnist(data_dir: Path | None) -> Dataset:
    """handwritten digits, 28×28, 60,000 and 10,000"""
    return _from_idx("mnist", data_dir, DIGIT_CLASSES, Normalisation(255.0, (0.1307,), (0.3081,)))


def fashion_mnist(data_dir: Path | None) -> Dataset:
    """clothing, 28×28, 60,000 and 10,000"""
    return _from_idx("fashion_mnist", data_dir, FASHION_CLASSES, Normalisation(255.0, (0.2860,), (0.3530,)))


def cifar10(data_dir: Path | None) -> Dataset:
    """colour photographs, 32×32, 10 classes, 50,000 and 10,000"""
    constants = Normalisation(255.0, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return _from_cifar("cifar10", data_dir, 1, CIFAR10_CLASSES, constants)


def cifar100(data_dir: Path | None) -> Dataset:
    """colour photographs, 32×32, 100 classes, 50,000 and 10,000"""
    constants = Normalisation(255.0, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
    return _from_cifar("cifar100", data_dir, 2, tuple(map(str, range(100))), constants)


def _samples(x: Array, y: Array) -> Samples:
    return Samples(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y.astype(np.int64)))


def _from_idx(name: str, data_dir: Path | None, classes: tuple[str, ...], constants: Normalisation) -> Dataset:
    folder = find(name, data_dir)
    arrays = [read_idx(path) for file in SOURCES[name].files if (path := locate(folder, file))]
    for images, labels in (arrays[:2], arrays[2:]):
        require(images.ndim == 3 and labels.ndim == 1, f"{folder}: images must have 3 dimensions and labels 1.")
    parts = [_samples(images[:, None], labels) for images, labels in (arrays[:2], arrays[2:])]
    return Dataset(name, parts[0], classes, test=parts[1], normalisation=constants)


def read_idx(path: Path) -> Array:
    """The unsigned bytes of an IDX file, plain or gzipped."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            head = stream.read(4)
            require(
                len(head) == 4 and head[:3] == b"\x00\x00\x08" and 1 <= head[3] <= 4,
                f"{path} is not an IDX file of unsigned bytes.",
            )
            lengths = stream.read(4 * head[3])
            require(len(lengths) == 4 * head[3], f"{path} ends inside its header.")
            shape = tuple(int(n) for n in np.frombuffer(lengths, dtype=">u4"))
            body = bytearray(stream.read(math.prod(shape) + 1))  # writable, as tensors must be
    except (OSError, EOFError, zlib.error, OverflowError, MemoryError) as error:
        raise FedadcError(f"{path} cannot be read ({error or type(error).__name__}).") from error
    require(
        len(body) == math.prod(shape),
        f"{path} should hold {' × '.join(map(str, shape))} bytes after its header, but holds "
        f"{'more' if len(body) > math.prod(shape) else len(body)}.",
    )
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def _from_cifar(
    name: str, data_dir: Path | None, label_bytes: int, classes: tuple[str, ...], constants: Normalisation
) -> Dataset:
    folder = find(name, data_dir)
    parts: dict[bool, list[tuple[Array, Array]]] = {False: [], True: []}
    for file, md5 in SOURCES[name].files.items():
        check_md5(folder / file, md5)
        parts[file.startswith("test")].append(read_cifar(folder / file, label_bytes))
    if name == "cifar100" and (names := folder / "fine_label_names.txt").is_file():
        listed = tuple(names.read_text(encoding="utf-8", errors="replace").split())
        classes = listed if len(listed) == len(classes) else classes
    train, test = (
        _samples(np.concatenate([x for x, _ in part]), np.concatenate([y for _, y in part]))
        for part in (parts[False], parts[True])
    )
    return Dataset(name, train, classes, test=test, normalisation=constants)


def read_cifar(path: Path, label_bytes: int) -> tuple[Array, Array]:
    """Images [n, 3, 32, 32] and labels of a binary file whose records are label bytes (the last counts) and pixels."""
    record = label_bytes + 3 * 32 * 32
    raw = np.fromfile(path, dtype=np.uint8)
    require(
        len(raw) > 0 and len(raw) % record == 0,
        f"{path} is not a CIFAR binary file: {len(raw)} bytes are no whole number of {record}-byte records.",
    )
    raw = raw.reshape(-1, record)
    return raw[:, label_bytes:].reshape(-1, 3, 32, 32), raw[:, label_bytes - 1]
