"""The table of data sets. A loader is a function that returns a `Dataset`; its docstring is its line in the list.

A loader takes what it needs by name: `data_dir` (where built-in sets are looked for), `path` and `test` (files or
folders of the user's), and any further settings of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from fedadc.data.dataset import Clients, Dataset, Normalisation, Samples
from fedadc.data.loaders.arrays import folder, from_arrays, from_clients, from_torch, npz
from fedadc.data.loaders.builtin import cifar10, cifar100, digits, fashion_mnist, mnist
from fedadc.data.loaders.csv import table

DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "npz": npz,
    "folder": folder,
    "csv": table,
}

__all__ = [
    "DATASETS", "Clients", "Dataset", "Normalisation", "Samples", "from_arrays", "from_clients", "from_torch",
]  # fmt: skip
