"""What each client of a run holds: its training share and its own test share, as they were or as they are now."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedadc.config.build import DEFAULT_TEST_SHARE, Plan, load_data
from fedadc.config.settings import Config
from fedadc.config.yaml import overlay, read_yaml
from fedadc.data.dataset import Clients, Dataset, Samples
from fedadc.data.loaders.npz import npz_like
from fedadc.data.shares import local_shares, shares_by_name
from fedadc.data.split import hold_out
from fedadc.errors import FedadcError, one_line, require
from fedadc.partitions import Natural, deal
from fedadc.rng import generator
from fedadc.runs.record import load_config

log = logging.getLogger("fedadc")


@dataclass(frozen=True)
class Shares:
    """Client k trains on the samples `clients[k]` of `train`, and is tested on `tests[k]` of `test`."""

    train: Samples
    clients: Clients
    test: Samples
    tests: Clients
    names: tuple[str, ...]  # of the clients where the data names them, else their numbers


def shares_of(plan: Plan) -> Shares:
    """Of a run's own data."""
    federation = plan.federation
    data = federation.data
    assert data.test is not None  # a config's data always has some
    return Shares(data.train, federation.clients, data.test, federation.local_tests, federation.client_names)


def _seed(config: Config) -> int:
    return config.seed if config.data.seed is None else config.data.seed


def changed_shares(file: Path, plan: Plan, before: Shares, data_dir: Path | None) -> Shares:
    """What the same clients hold now: an .npz or .csv file that names them, or the `data` of a YAML file dealt anew."""
    require(file.is_file(), f"--data: there is no file {file}.")
    anew = file.suffix.lower() in (".yaml", ".yml")
    now, clients, natural = (_dealt_anew if anew else _of_file)(file, plan, before.names, data_dir)
    assert now.test is not None
    if natural and now.test_owners is not None:
        tests = shares_by_name(now.test_owners, before.names)
    else:
        counts = clients.class_counts(now.train.y, len(now.classes))
        tests = local_shares(now.test.y.numpy(), counts, generator(_seed(plan.config), "local test shares"))
    after = Shares(now.train, clients, now.test, tests, before.names)
    _warn_of_known(after.test, before.train, file)
    _warn_of_another_scale(now.train, before.train, file)
    gone = [name for k, name in enumerate(before.names) if not len(clients[k])]
    if gone:
        log.warning("%s holds nothing of the clients %s, which are left out", file, ", ".join(gone[:5]))
    return after


def _warn_of_another_scale(now: Samples, known: Samples, file: Path) -> None:
    """Inputs are the run's raw ones, before any normalization."""
    (low, high), (least, most) = (tuple(map(float, x.aminmax())) for x in (now.x, known.x))
    largest, usual = max(abs(low), abs(high)), max(abs(least), abs(most))
    if not usual / 2 <= largest <= 2 * usual:
        log.warning(
            "%s holds values from %g to %g, but the run was trained on %g to %g; new samples must be in the same units",
            *(file, low, high, least, most),
        )


def _require_like(file: Path, now: Dataset, known: Dataset) -> None:
    """Refuse samples that the model cannot be given, and classes that it does not know."""
    shapes, kinds = ([list(d.input_shape) for d in (now, known)], [d.train.x.dtype for d in (now, known)])
    alike = shapes[0] == shapes[1] and kinds[0] == kinds[1]
    others = " with other names" if alike and len(now.classes) == len(known.classes) else ""
    require(
        alike and now.classes == known.classes,
        f"{file} holds {shapes[0]} {kinds[0]} of {len(now.classes)} classes, but the model was trained on {shapes[1]} "
        f"{kinds[1]} of {len(known.classes)} classes{others}.",
    )


def _dealt_anew(file: Path, plan: Plan, names: tuple[str, ...], data_dir: Path | None) -> tuple[Dataset, Clients, bool]:
    """By the `data` of a config, laid over the run's own."""
    node = read_yaml(file).get("data")
    require(node is not None, f"{file} has no `data`, as a config has.")
    own = isinstance(node, Mapping) and "name" not in node  # some settings of the run's own data
    folder = plan.config.folder if own else file.resolve().parent
    config, data = load_data(load_config(overlay(plan.config.tree(), {"data": node}), folder=folder), data_dir)
    _require_like(file, data, plan.federation.data)
    clients = deal(data, config.data.partition, config.data.clients, _seed(config))
    require(len(clients) == len(names), f"{file} deals to {len(clients)} clients, but the run has {len(names)}.")
    return data, clients, isinstance(config.data.partition, Natural)


def _of_file(file: Path, plan: Plan, names: tuple[str, ...], data_dir: Path | None) -> tuple[Dataset, Clients, bool]:
    """With the classes, and of a table the columns, of the run's own data."""
    config = plan.config
    if config.data.name == "csv":
        as_test = replace(config, data=replace(config.data, test=str(file.resolve()), validation=None))
        require(
            file.suffix.lower() == ".csv", f"--data: {file.name} should be a .csv, as the run's own data, or .yaml."
        )
        try:
            read = load_data(as_test, data_dir)[1]
        except FedadcError as error:
            raise FedadcError(f"--data: {file.name} does not fit the run ({one_line(error).rstrip('.')}).") from error
        assert read.test is not None
        now = replace(read, train=read.test, owners=read.test_owners, test=None, test_owners=None)
    else:
        require(file.suffix.lower() == ".npz", f"--data: {file.name} should be .npz or .yaml (.csv after a csv run).")
        now = npz_like(file, plan.federation.data)
    _require_like(file, now, plan.federation.data)
    require(now.owners is not None, f"{file} does not say which client holds what: it needs client ids.")
    assert now.owners is not None
    strange = sorted({str(i) for i in np.unique(now.owners)} - set(names))
    require(not strange, f"{file} names the client {', '.join(strange[:3])}, which the run does not have.")
    if now.test is None:
        share = config.data.test if isinstance(config.data.test, float) else DEFAULT_TEST_SHARE
        now = hold_out(now, share, "test", _seed(config))
    assert now.owners is not None
    return now, shares_by_name(now.owners, names), True


def _warn_of_known(test: Samples, trained: Samples, file: Path) -> None:
    """Samples that the global model was trained on flatter it."""
    seen = {row.tobytes() for row in trained.x.numpy()}
    known = sum(row.tobytes() in seen for row in test.x.numpy())
    if known:
        log.warning(
            "%d of the %d test samples of %s were in the run's training data, which flatters every figure on them",
            *(known, len(test), file),
        )
