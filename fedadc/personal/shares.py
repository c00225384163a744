"""The training share and the test share of every client: those of the run, or those of changed data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedadc.config.build import Plan, load_data
from fedadc.config.settings import Config, parse_config
from fedadc.config.yaml import overlay, read_yaml
from fedadc.data.dataset import Clients, Dataset, Samples
from fedadc.data.loaders.csv import csv_like
from fedadc.data.loaders.npz import npz_like
from fedadc.data.remarks import count_repeated
from fedadc.data.shares import local_shares, shares_by_name
from fedadc.data.split import DEFAULT_TEST_SHARE, HeldOut
from fedadc.errors import DataError, FedadcError, one_line, require, same_kind
from fedadc.partitions import Natural, deal
from fedadc.rng import generator
from fedadc.runs.record import TRAINING_ONLY
from fedadc.system.user_code import UserCode

log = logging.getLogger("fedadc")


@dataclass(frozen=True)
class Shares:
    """Client k trains on the samples `clients[k]` of `train`, and is tested on `tests[k]` of `test`."""

    train: Samples
    clients: Clients
    test: Samples
    tests: Clients
    names: tuple[str, ...]  # of the clients; their numbers if the data does not name them


def shares_of(plan: Plan) -> Shares:
    """The shares in the data of the run."""
    federation = plan.federation
    data = federation.data
    assert data.test is not None  # data from a config always has test samples
    return Shares(data.train, federation.clients, data.test, federation.local_tests, federation.client_names)


def _seed(config: Config) -> int:
    return config.seed if config.data.seed is None else config.data.seed


def changed_shares(file: Path, plan: Plan, before: Shares, data_dir: Path | None) -> Shares:
    """The shares of the same clients in new data.

    The new data is an .npz or .csv file with the client of every sample, or a YAML file whose `data` is partitioned.
    """
    require(file.is_file(), f"data: there is no file {file}.", DataError)
    read = _read_yaml_data if file.suffix.lower() in (".yaml", ".yml") else _read_data_file
    new, clients, natural = read(file, plan, before.names, data_dir)
    assert new.test is not None
    if natural and new.test_owners is not None:
        tests = shares_by_name(new.test_owners, before.names)
    else:
        counts, strata = new.label_counts(clients), new.task.strata(new.test.y)
        tests = local_shares(strata, counts, generator(_seed(plan.config), "local test shares"))
    after = Shares(new.train, clients, new.test, tests, before.names)
    _warn_of_trained_test_samples(after.test, before.train, file)
    _warn_of_other_scale(new.train, before.train, file)
    missing = [name for k, name in enumerate(before.names) if not len(clients[k])]
    if missing:
        log.warning("%s has no samples of the clients %s, which are left out", file, ", ".join(missing[:5]))
    return after


def _warn_of_other_scale(new: Samples, old: Samples, file: Path) -> None:
    """Warn if the raw inputs, before any normalization, have another range than in training."""
    (new_low, new_high), (old_low, old_high) = (tuple(map(float, x.aminmax())) for x in (new.x, old.x))
    new_size, old_size = max(abs(new_low), abs(new_high)), max(abs(old_low), abs(old_high))
    if not old_size / 2 <= new_size <= 2 * old_size:
        log.warning(
            "%s has values from %g to %g, but the run was trained on %g to %g; new samples must be in the same units",
            *(file, new_low, new_high, old_low, old_high),
        )


def _require_compatible(file: Path, new: Dataset, old: Dataset) -> None:
    """Refuse samples of another shape or type, and other classes, than the model was trained on."""
    shapes, dtypes = ([list(d.input_shape) for d in (new, old)], [d.train.x.dtype for d in (new, old)])
    same_inputs = shapes[0] == shapes[1] and dtypes[0] == dtypes[1]
    only_names = " with other names" if same_inputs and len(new.classes) == len(old.classes) else ""
    require(
        same_inputs and new.classes == old.classes,
        f"{file} has samples {shapes[0]} {dtypes[0]} of {new.task.words[1]}, but the model was trained on "
        f"{shapes[1]} {dtypes[1]} of {old.task.words[1]}{only_names}.",
        DataError,
    )


def _read_yaml_data(
    file: Path, plan: Plan, names: tuple[str, ...], data_dir: Path | None
) -> tuple[Dataset, Clients, bool]:
    """The data of the run with the `data` settings of a YAML file, its clients, and whether they are natural ones."""
    node = read_yaml(file).get("data")
    require(node is not None, f"{file} has no `data` node like that of a config.")
    same_data = isinstance(node, Mapping) and "name" not in node  # only changes settings of the run's data
    tree = overlay(plan.config.tree(), {"data": node})
    code = plan.config.schema.code
    if not same_data:
        code = UserCode(file.resolve().parent, code.notes, given=plan.config.classes())
    config, data = load_data(parse_config(tree, code, without=TRAINING_ONLY), data_dir)
    _require_compatible(file, data, plan.federation.data)
    clients = deal(data, config.data.partition, config.data.clients, _seed(config))
    require(len(clients) == len(names), f"{file} has {len(clients)} clients, but the run has {len(names)}.")
    return data, clients, isinstance(config.data.partition, Natural)


def _read_data_file(
    file: Path, plan: Plan, names: tuple[str, ...], data_dir: Path | None
) -> tuple[Dataset, Clients, bool]:
    """The data of an .npz or .csv file with the classes (and columns) of the run, its clients, and True: natural."""
    config = plan.config
    if config.data.name == "csv":
        require(file.suffix.lower() == ".csv", f"data: {file.name} must be a .csv, like the run's data, or a .yaml.")
        try:
            new = csv_like(file, plan.federation.data)
        except FedadcError as error:
            message = f"data: {file.name} does not fit the run ({one_line(error).rstrip('.')})."
            raise same_kind(error, message) from error
    else:
        require(file.suffix.lower() == ".npz", f"data: {file.name} must be .npz or .yaml (.csv for csv data).")
        new = npz_like(file, plan.federation.data)
    _require_compatible(file, new, plan.federation.data)
    no_owners = f"{file} does not say which client each sample belongs to: it needs client ids."
    require(new.owners is not None, no_owners, DataError)
    assert new.owners is not None
    unknown = sorted({str(i) for i in np.unique(new.owners)} - set(names))
    require(not unknown, f"{file} names the clients {', '.join(unknown[:3])}, which the run does not have.", DataError)
    if new.test is None:
        share = config.data.test if isinstance(config.data.test, float) else DEFAULT_TEST_SHARE
        new = HeldOut(share, seed=_seed(config))(new)
    assert new.owners is not None
    return new, shares_by_name(new.owners, names), True


def _warn_of_trained_test_samples(test: Samples, train: Samples, file: Path) -> None:
    """Warn of test samples that the global model was trained on: figures on them are too good."""
    count = count_repeated(train, test)
    if count:
        log.warning(
            "%d of the %d test samples of %s were in the run's training data; figures on them are too good",
            *(count, len(test), file),
        )
