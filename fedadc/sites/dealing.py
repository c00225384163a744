"""The data of a simulation, dealt to the folders of sites that are tried on one machine.

Every site gets one file with the samples of its client, and nothing of any other. A table with a column of clients is
dealt row by row, as it is; other data as arrays. Test samples that belong to nobody go to the server.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedadc.config.build import load_data, prepare
from fedadc.config.settings import Config
from fedadc.data.dataset import Array, Dataset, Samples
from fedadc.data.spelling import likeness, spelled
from fedadc.errors import require
from fedadc.sites.node import require_file_name

SERVER_FILE = "server.npz"


@dataclass(frozen=True)
class DealtData:
    """Where the data of the sites is."""

    sites: Mapping[str, Path]  # by the name of the client, in the order of their numbers
    server: Path | None  # test samples of the server; None: the sites have their own
    at_sites: bool = True  # whether the sites have test samples

    @property
    def evaluate(self) -> Literal["sites", "server", "both"]:
        """Who evaluates."""
        if self.server is None:
            return "sites"
        return "both" if self.at_sites else "server"


def deal(config: Config, sites: int | None, folder: Path, data_dir: Path | None = None) -> DealtData:
    """Deal the data of a config to so many sites, or to its own clients."""
    if sites is not None and load_data(config, data_dir)[1].owners is None:
        config = replace(config, data=replace(config.data, clients=sites))
    federation = prepare(config, data_dir).federation
    names, data, clients = federation.client_names, federation.data, federation.clients
    require(
        sites is None or len(names) == sites, f"the data has {len(names)} clients, so --sites must be {len(names)}."
    )
    for name in names:
        require_file_name(name, "the name of a client")
    folder.mkdir(parents=True, exist_ok=True)
    if config.data.name == "csv" and data.test_owners is not None and isinstance(config.data.test, float | None):
        return DealtData(_deal_rows(config, names, folder), None)
    method = federation.method
    owned = data.test_owners is not None or method.personalized or not method.federated
    tuned = config.federation is not None and config.federation.personalize is not None
    tests = federation.local_tests if data.test is not None and (owned or tuned) else None
    paths: dict[str, Path] = {}
    for number, name in enumerate(names):
        arrays = {**_facts(data), **_pair(data, data.train.take(clients[number]))}
        if tests is not None and data.test is not None:
            arrays |= _pair(data, data.test.take(tests[number]), "_test")
        paths[name] = folder / f"{name}.npz"
        _save(paths[name], arrays)
    if owned or data.test is None:
        return DealtData(paths, None)
    held = {f"_{split}": samples for split, samples in data.splits().items() if split != "train"}
    server = {key: array for ending, samples in held.items() for key, array in _pair(data, samples, ending).items()}
    _save(folder / SERVER_FILE, {**_facts(data), **server})
    return DealtData(paths, folder / SERVER_FILE, tests is not None)


def _save(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


def _facts(data: Dataset) -> dict[str, Array]:
    """What a site cannot see in its own samples."""
    constants, targets = data.normalization, data.targets
    return {
        **{f"target{end}": np.array([getattr(t, key) for t in targets])
           for end, key in (("", "name"), ("_center", "center"), ("_spread", "spread")) if targets},
        "classes": np.array(data.classes), "scale": np.array(constants.scale), "mean": np.array(constants.mean),
        "std": np.array(constants.std),
    }  # fmt: skip


def _pair(data: Dataset, samples: Samples, ending: str = "") -> dict[str, Array]:
    """Inputs, and labels by name: numbers could be names or positions. Numbers to predict are as they are."""
    labels = samples.y.numpy()
    return {f"x{ending}": samples.x.numpy(), f"y{ending}": labels if data.targets else np.array(data.classes)[labels]}


def _deal_rows(config: Config, names: Sequence[str], folder: Path) -> dict[str, Path]:
    """The rows of a table by client, without the column that names it."""
    path, column = config.file(str(config.data.path)), config.data.options["client"]
    with path.open(newline="", encoding="utf-8-sig") as file:
        header, *rows = [row for row in csv.reader(file) if row]
    position = [name.strip() for name in header].index(column)
    found = {name: folder / f"{name}.csv" for name in names}
    for name, own in found.items():
        with own.open("w", newline="", encoding="utf-8") as file:
            written = csv.writer(file)
            wanted = likeness(name)  # names that look alike are one client: others were refused
            for row in (header, *(row for row in rows if likeness(spelled(row[position])) == wanted)):
                written.writerow(row[:position] + row[position + 1 :])
    return found
