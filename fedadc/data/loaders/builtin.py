"""Load the built-in data sets: digits (part of the package), MNIST and Fashion-MNIST (IDX), CIFAR-10 and CIFAR-100.

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

from fedadc.data.dataset import Array, Dataset, Normalization, Samples
from fedadc.data.loaders.download import SOURCES, check_md5, find, locate
from fedadc.data.loaders.facts import DIGITS, FACTS
from fedadc.data.loaders.limits import require_proportionate
from fedadc.errors import DataError, kind_of_failure, one_line, require, require_file


def digits() -> Dataset:
    """scikit-learn's handwritten digits, 8×8; no test split of its own"""
    with package_files("fedadc.data.loaders").joinpath("digits.npz").open("rb") as stream, np.load(stream) as arrays:
        samples = _samples(arrays["x"], arrays["y"])
    return Dataset("digits", samples, DIGITS, normalization=Normalization(scale=16.0))


def mnist(data_dir: Path | None) -> Dataset:
    """handwritten digits, 28×28, 60,000 training and 10,000 test samples"""
    return _from_idx("mnist", data_dir)


def fashion_mnist(data_dir: Path | None) -> Dataset:
    """clothing, 28×28, 60,000 training and 10,000 test samples"""
    return _from_idx("fashion_mnist", data_dir)


def cifar10(data_dir: Path | None) -> Dataset:
    """color photographs, 32×32, 10 classes, 50,000 training and 10,000 test samples"""
    return _from_cifar("cifar10", data_dir, label_bytes=1)


def cifar100(data_dir: Path | None) -> Dataset:
    """color photographs, 32×32, 100 classes, 50,000 training and 10,000 test samples"""
    return _from_cifar("cifar100", data_dir, label_bytes=2)


def _samples(x: Array, y: Array) -> Samples:
    return Samples(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y.astype(np.int64)))


def _from_idx(name: str, data_dir: Path | None) -> Dataset:
    folder, facts = find(name, data_dir), FACTS[name]
    arrays = [read_idx(path) for file in SOURCES[name].files if (path := locate(folder, file))]
    for images, labels in (arrays[:2], arrays[2:]):
        require(
            images.ndim == 3 and labels.ndim == 1, f"{folder}: images must have 3 dimensions and labels 1.", DataError
        )
    parts = [_samples(images[:, None], labels) for images, labels in (arrays[:2], arrays[2:])]
    return Dataset(name, parts[0], facts.classes, test=parts[1], normalization=facts.normalization)


def read_idx(path: Path) -> Array:
    """The array of unsigned bytes in an IDX file, plain or gzipped."""
    require_file(path, "data")
    zipped = path.suffix == ".gz"
    try:
        with gzip.open(path, "rb") if zipped else path.open("rb") as stream:
            shape = _idx_shape(stream.read(20), path)
            size, stored = math.prod(shape), path.stat().st_size
            declared = f"{' × '.join(map(str, shape))} bytes"
            if zipped:
                what = f"{path}, whose header declares {declared},"
                require_proportionate(size, stored, what, "if the file is correct, decompress it first")
            stream.seek(4 + 4 * len(shape))
            limit = size if zipped else min(size, stored)
            body = bytearray(stream.read(limit + 1))  # a bytearray, because torch warns about read-only memory
    except (OSError, EOFError, zlib.error) as error:
        raise kind_of_failure(error)(f"{path} cannot be read ({one_line(error)}).") from error
    found = "more" if len(body) > size else len(body)
    require(len(body) == size, f"{path} should contain {declared} after its header, but contains {found}.", DataError)
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def _idx_shape(head: bytes, path: Path) -> tuple[int, ...]:
    require(
        head[:3] == b"\x00\x00\x08" and len(head) > 3 and 1 <= head[3] <= 4,
        f"{path} is not an IDX file of unsigned bytes.",
        DataError,
    )
    end = 4 + 4 * head[3]
    require(len(head) >= end, f"{path} ends inside its header.", DataError)
    shape = tuple(int(n) for n in np.frombuffer(head[4:end], dtype=">u4"))
    require(0 not in shape, f"{path} is empty: its header declares {' × '.join(map(str, shape))} bytes.", DataError)
    return shape


def _from_cifar(name: str, data_dir: Path | None, label_bytes: int) -> Dataset:
    folder, classes = find(name, data_dir), FACTS[name].classes
    parts: dict[bool, list[tuple[Array, Array]]] = {False: [], True: []}
    for file, md5 in SOURCES[name].files.items():
        check_md5(folder / file, md5)
        parts[file.startswith("test")].append(read_cifar(folder / file, label_bytes, len(classes)))
    if name == "cifar100" and (names := folder / "fine_label_names.txt").is_file():
        with names.open(encoding="utf-8", errors="replace") as stream:
            listed = tuple(stream.read(100 * len(classes)).split())
        classes = listed if len(set(listed)) == len(listed) == len(classes) else classes
    train, test = (
        _samples(np.concatenate([x for x, _ in part]), np.concatenate([y for _, y in part]))
        for part in (parts[False], parts[True])
    )
    return Dataset(name, train, classes, test=test, normalization=FACTS[name].normalization)


def read_cifar(path: Path, label_bytes: int, classes: int) -> tuple[Array, Array]:
    """Images [n, 3, 32, 32] and labels of a CIFAR binary file.

    A record consists of `label_bytes` labels, of which the last one is used, and 3072 pixels.
    """
    require_file(path, "data")
    record, size = label_bytes + 3 * 32 * 32, path.stat().st_size
    require(
        size > 0 and size % record == 0,
        f"{path} is not a CIFAR binary file: its size, {size} bytes, is not a multiple of {record}-byte records.",
        DataError,
    )
    raw = np.fromfile(path, dtype=np.uint8, count=size).reshape(-1, record)
    labels = raw[:, label_bytes - 1]
    invalid = np.flatnonzero(labels >= classes)
    if len(invalid):
        position = int(invalid[0])
        raise DataError(f"{path}, record {position}: the label {labels[position]} is outside 0..{classes - 1}.")
    return raw[:, label_bytes:].reshape(-1, 3, 32, 32), labels
