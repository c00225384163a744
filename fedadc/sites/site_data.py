"""The data of one site: its own file, folder or function, read on the site and nowhere else.

A site holds out its own test and validation shares as a natural client does in a simulation: by its rows, its name and
the seed. What becomes of its rows is decided by the schema that all sites agree on, so a site has the samples that a
simulation with everybody's rows would give to its client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedadc.config.settings import Config
from fedadc.data.columns import Fields
from fedadc.data.dataset import Array, Dataset, Normalization, Samples
from fedadc.data.loaders.arrays import (
    Pair,
    checked_inputs,
    checked_labels,
    checked_numbers,
    default_normalization,
    named_targets,
)
from fedadc.data.loaders.csv import read_table
from fedadc.data.loaders.images import read_images
from fedadc.data.loaders.npz import pair_in, read_npz
from fedadc.data.loaders.table import Table, own_scales
from fedadc.data.rules import TableRules
from fedadc.data.schema import DataSchema
from fedadc.data.spelling import likeness, spelled
from fedadc.data.split import DEFAULT_TEST_SHARE, HeldOut, SplitRows
from fedadc.data.targets import Sums, sums_of_targets
from fedadc.errors import DataError, FedadcError, one_line, require
from fedadc.sites.node import file_of
from fedadc.sites.schema import ArraySummary, SiteSummary
from fedadc.tasks import Target

SPLITS = ("train", "validation", "test")


def rules_of(config: Config) -> TableRules:
    """What a config says about tables."""
    options = config.data.options
    names = ("scale", "categories", "missing", "merge_names", "label")
    return TableRules.of(**{name: options[name] for name in names if name in options}, task=config.task)


class SiteData(ABC):
    """What a site can tell about its data, and its samples once the schema is known."""

    @abstractmethod
    def summary(self, as_text: Collection[str] = ()) -> SiteSummary:
        """What the server learns; `as_text`: columns whose numbers are categories at some site."""

    @abstractmethod
    def samples(self, schema: DataSchema) -> dict[str, Samples]:
        """The samples of every split that is not empty; an error if the data does not fit."""


@dataclass(frozen=True)
class TableData(SiteData):
    """A CSV file with the rows of one site."""

    name: str
    table: Table
    rows: SplitRows

    @staticmethod
    def read(path: Path, name: str, config: Config, held_out: HeldOut) -> TableData:
        options = config.data.options
        require("label" in options, "data.label is missing: the config must name the label column of the tables.")
        client: str | None = options.get("client")
        table = read_table(path, options["label"], client, options.get("drop") or (), rules_of(config), False)
        if table.clients is not None:
            same: Callable[[str], str] = likeness if table.rules.spelling.merge_names else str
            others = [word for word in table.clients.words if same(word) != same(spelled(name))]
            require(
                not others,
                f"{path}: column {client} has rows of {', '.join(others)[:60]}, but this site is {name}.",
                DataError,
            )
        own = Fields.of_texts(np.zeros(len(table.labels), np.int32), (name,))
        table = replace(table, columns={**table.columns, "": own}, client="")  # no other column has this name
        return TableData(name, table, table.split(held_out))

    def summary(self, as_text: Collection[str] = ()) -> SiteSummary:
        (own,) = self.table.summaries(self.rows.train, as_text)
        return SiteSummary(self.name, len(self.rows.train), table=own)

    def samples(self, schema: DataSchema) -> dict[str, Samples]:
        require(schema.encoding is not None, f"site {self.name} has a table, but the federation has arrays.", DataError)
        assert schema.encoding is not None
        encoding = schema.encoding
        if any(column.by_client for column in encoding.columns):
            texts = [column.name for column in encoding.columns if column.categories is not None]
            (own,) = self.table.summaries(self.rows.train, texts, sums=True)
            encoding = replace(encoding, scales={self.name: own_scales(own, encoding)})
        everything = self.table.samples(encoding)
        found = {split: everything.take(getattr(self.rows, split)) for split in SPLITS}
        return {split: samples for split, samples in found.items() if len(samples)}


@dataclass(frozen=True)
class Arrays:
    """What a site's file or function has."""

    train: Pair
    test: Pair | None = None  # without it, the site holds out a share
    classes: tuple[str, ...] = ()  # if they are given, labels may be positions in them
    normalization: Normalization | None = None
    targets: tuple[Target, ...] = ()  # names of the numbers to predict, and their constants if they are given


@dataclass(frozen=True)
class ArrayData(SiteData):
    """Arrays, images, or what a function of the site returns."""

    name: str
    inputs: dict[str, Tensor]  # by split
    labels: dict[str, Array]  # by split: numbers or texts
    classes: tuple[str, ...]
    normalization: Normalization
    targets: tuple[Target, ...] = ()

    @staticmethod
    def of(arrays: Arrays, name: str, held_out: HeldOut, task: str | None = None) -> ArrayData:
        source, checked = f"of site {name}", checked_numbers if task == "regression" else checked_labels
        x, y = checked_inputs(arrays.train[0], source, "training"), checked(arrays.train[1], source)
        require(len(x) == len(y) > 0, f"site {name} has {len(x)} inputs and {len(y)} labels.", DataError)
        held_out = held_out if arrays.test is None else replace(held_out, test=None)
        numbers = task == "regression"
        code = np.zeros(len(y), np.int64) if numbers else np.unique(y, return_inverse=True)[1].reshape(-1)
        rows = held_out.rows(code, np.full(len(y), name))
        inputs = {split: x[torch.from_numpy(getattr(rows, split))] for split in SPLITS}
        labels = {split: y[getattr(rows, split)] for split in SPLITS}
        if arrays.test is not None:
            inputs["test"] = checked_inputs(arrays.test[0], source, "test")
            labels["test"] = checked(arrays.test[1], source)
        constants = arrays.normalization or default_normalization(x)
        if numbers:
            targets = arrays.targets or named_targets(None, y.shape[1])
            return ArrayData(name, inputs, labels, (), constants, targets)
        if arrays.classes:
            labels = {split: _named(own, arrays.classes, name) for split, own in labels.items()}
        classes = arrays.classes or tuple(str(label) for label in np.unique(labels["train"]))
        return ArrayData(name, inputs, labels, classes, constants)

    def summary(self, as_text: Collection[str] = ()) -> SiteSummary:
        train = self.inputs["train"]
        integers = self.labels["train"].dtype.kind == "i"
        sums: tuple[Sums, ...] = ()
        if not all(target.scaled for target in self.targets):
            (sums,) = sums_of_targets(self.labels["train"], [np.arange(len(train))])
        arrays = ArraySummary(
            _shape(train), _type(train), self.normalization, self.classes, integers, self.targets, sums
        )  # fmt: skip
        return SiteSummary(self.name, len(train), arrays=arrays)

    def samples(self, schema: DataSchema) -> dict[str, Samples]:
        require(schema.encoding is None, f"site {self.name} has arrays, but the federation has tables.", DataError)
        code, found = {name: k for k, name in enumerate(schema.classes)}, {}
        for split in (split for split in SPLITS if len(self.labels[split])):
            x, y = self.inputs[split], self.labels[split]
            require(
                (_shape(x), _type(x)) == (schema.shape, schema.dtype),
                f"site {self.name} has {split} inputs {list(_shape(x))} of type {_type(x)}, but the federation has "
                f"{list(schema.shape)} of type {schema.dtype}.",
                DataError,
            )
            if schema.targets:
                wanted = f"{len(schema.targets)} numbers"
                require(y.ndim == 2 and y.shape[1] == len(schema.targets), f"labels need {wanted}.", DataError)
                found[split] = Samples(x, torch.from_numpy(y))
                continue
            values, position = np.unique(y, return_inverse=True)
            unknown = [str(value) for value in values if str(value) not in code]
            require(
                not unknown,
                f"site {self.name} has the {split} label {', '.join(unknown)[:40]}, unknown to the federation.",
                DataError,
            )
            codes = np.array([code[str(value)] for value in values], dtype=np.int64)[position.reshape(-1)]
            found[split] = Samples(x, torch.from_numpy(codes))
        return found


def _shape(inputs: Tensor) -> tuple[int, ...]:
    return tuple(inputs.shape[1:])


def _type(inputs: Tensor) -> str:
    return str(inputs.dtype).removeprefix("torch.")


def _named(labels: Array, classes: tuple[str, ...], name: str) -> Array:
    """Labels by their names, where they may be positions in the list of classes."""
    if labels.dtype.kind != "i" or not len(labels) or all(str(label) in classes for label in np.unique(labels)):
        return labels
    inside = labels.min() >= 0 and labels.max() < len(classes)
    require(inside, f"site {name} has the label {labels.max()}, but {len(classes)} classes.", DataError)
    named: Array = np.array(classes)[labels]
    return named


def read_site_data(path: str, name: str, config: Config, holds_out: bool = True) -> SiteData:
    """The data of a site, by the kind of its file; without `holds_out`, all of it is for training."""
    node = config.data
    test = node.test if isinstance(node.test, float) else DEFAULT_TEST_SHARE
    seed = config.seed if node.seed is None else node.seed
    held_out = HeldOut(test, node.validation, seed) if holds_out else HeldOut(seed=seed)
    file, function = file_of(path)
    if function:
        return ArrayData.of(_called(file, function, name), name, held_out, config.task)
    if file.suffix.lower() == ".csv":
        return TableData.read(file, name, config, held_out)
    if file.is_dir():
        return ArrayData.of(Arrays(*_image_pairs(file, node.options.get("size"))), name, held_out, config.task)
    return ArrayData.of(_arrays_in(file), name, held_out, config.task)


def _arrays_in(path: Path) -> Arrays:
    """The arrays of an .npz file: x and y; optionally x_test, y_test, classes, and scale, mean, std of the inputs."""
    found = read_npz(path)
    test = pair_in(found, path, ("_test",)) if {"x_test", "y_test"} & found.keys() else None
    constants = None
    if {"scale", "mean", "std"} & found.keys():
        scale, mean, std = (np.atleast_1d(found.get(key, np.array([]))) for key in ("scale", "mean", "std"))
        numbers = all(array.ndim == 1 and array.dtype.kind in "iuf" for array in (scale, mean, std))
        require(numbers, f"{path} needs numbers in scale, mean and std, one per channel in mean and std.", DataError)
        constants = Normalization(float(scale[0]) if len(scale) else 1.0, tuple(mean.tolist()), tuple(std.tolist()))
    classes = tuple(str(name) for name in np.atleast_1d(found.get("classes", np.array([]))))
    return Arrays(pair_in(found, path, ("", "_train")), test, classes, constants, _targets_in(found, path))


def _targets_in(found: Mapping[str, Array], path: Path) -> tuple[Target, ...]:
    """The names and the constants of the labels of a regression, if the file has them."""
    keys = ("target", "target_center", "target_spread")
    given = [key for key in keys if key in found]
    if not given:
        return ()
    needed = f"{path} needs the arrays {', '.join(keys)} of one length, texts, numbers and numbers above 0"
    require(len(given) == len(keys), f"{needed}; it has {', '.join(given)} only.", DataError)
    names, centers, spreads = (np.atleast_1d(found[key]) for key in keys)
    require(names.ndim == 1 and names.shape == centers.shape == spreads.shape, f"{needed}.", DataError)
    require(centers.dtype.kind in "iuf" and spreads.dtype.kind in "iuf", f"{needed}.", DataError)
    columns = zip(names.tolist(), centers.tolist(), spreads.tolist(), strict=True)
    return tuple(Target(str(name), float(center), float(spread)) for name, center, spread in columns)


def _called(file: Path, function: str, name: str) -> Arrays:
    """What a function in a file of the site returns: a Dataset, or inputs and labels."""
    from fedadc.system.user_code import UserCode

    load = UserCode(file.parent).load(f"{file.stem}:{function}", "data-path")
    try:
        found = load()
    except FedadcError:
        raise
    except Exception as error:
        raise DataError(
            f"site {name}: {function} in {file} failed ({type(error).__name__}: {one_line(error)})."
        ) from error
    if isinstance(found, Dataset):
        test = None if found.test is None else (found.test.x, found.test.y)
        return Arrays((found.train.x, found.train.y), test, found.classes, found.normalization, found.targets)
    require(
        isinstance(found, tuple) and len(found) == 2,
        f"site {name}: {function} in {file} must return a Dataset, or inputs and labels, not {type(found).__name__}.",
        DataError,
    )
    return Arrays(found)


def _image_pairs(path: Path, size: int | None) -> tuple[Pair, Pair | None]:
    """The training images of a folder, and its test images if it has folders train/ and test/."""
    pixels = None if size is None else (size, size)
    if (path / "train").is_dir() and (path / "test").is_dir():
        return read_images(path / "train", pixels), read_images(path / "test", pixels)
    return read_images(path, pixels), None
