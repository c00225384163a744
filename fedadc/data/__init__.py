"""The table of data sets. A loader is a function that returns a `Dataset`; its docstring is its line in the list.

A loader takes what it needs by name: `data_dir` (where built-in sets are looked for), `path` and `test` (files or
folders of the user's), and any further settings of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from fedadc.data.dataset import Clients, Dataset, Normalization, Samples
from fedadc.data.loaders.arrays import from_arrays, from_clients, from_torch
from fedadc.data.loaders.builtin import cifar10, cifar100, digits, fashion_mnist, mnist
from fedadc.data.loaders.csv import csv_table
from fedadc.data.loaders.images import image_folder
from fedadc.data.loaders.npz import npz

DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "npz": npz,
    "image_folder": image_folder,
    "csv": csv_table,
}

__all__ = [
    "DATASETS", "Clients", "Dataset", "Normalization", "Samples", "from_arrays", "from_clients", "from_torch",
]  # fmt: skip
