"""Data sets and the table of their loaders.

A loader is a function that returns a `Dataset`. Its docstring is shown by `fedadc list datasets`. Arguments are passed
by name: `data_dir` (the folder to search for built-in data sets), `path` and `test` (the user's files or folders),
`held_out` (a `HeldOut`: the shares that a loader must hold out itself, because it fits something on training rows; for
loaders without this parameter it is done afterwards), and the loader's own settings.
"""

from __future__ import annotations

from collections.abc import Callable

from fedadc.data.batches import Augment, Batch
from fedadc.data.dataset import Clients, Dataset, DataSpec, Normalization, Samples
from fedadc.data.loaders.arrays import from_arrays, from_clients, from_torch
from fedadc.data.loaders.builtin import cifar10, cifar100, digits, fashion_mnist, mnist
from fedadc.data.loaders.csv import csv_table, from_csv
from fedadc.data.loaders.frame import from_frame
from fedadc.data.loaders.images import from_images, image_folder
from fedadc.data.loaders.npz import from_npz, npz
from fedadc.data.roster import Roster
from fedadc.data.split import HeldOut

DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "npz": npz,
    "folder": image_folder,
    "csv": csv_table,
}

__all__ = [
    "DATASETS", "Augment", "Batch", "Clients", "DataSpec", "Dataset", "HeldOut", "Normalization", "Roster", "Samples",
    "cifar10", "cifar100", "digits", "fashion_mnist", "from_arrays", "from_clients", "from_csv", "from_frame",
    "from_images", "from_npz", "from_torch", "mnist",
]  # fmt: skip
