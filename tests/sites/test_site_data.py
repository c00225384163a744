"""A site that has only its own rows has the samples that a simulation with everybody's rows gives to its client."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedadc.config.build import load_data
from fedadc.data.dataset import Dataset
from fedadc.data.rules import TableRules
from fedadc.data.schema import DataSchema
from fedadc.errors import FedadcError
from fedadc.fields.plain import from_json, to_json
from fedadc.runs.record import load_config
from fedadc.sites.schema import SiteSummary, merged_schema, mixed_columns, permitted
from fedadc.sites.site_data import SiteData, read_site_data, rules_of

HOSPITALS = ("zurich", "bern", "10", "9")


def hospital_rows(seed: int = 0) -> list[dict[str, str]]:
    """Numbers, texts, missing values, a column that only one hospital fills with texts, unequal hospitals."""
    rng, rows = np.random.default_rng(seed), []
    for k, hospital in enumerate(HOSPITALS):
        for _ in range(20 + 9 * k):
            rows.append(
                {
                    "age": str(rng.integers(20, 90)) if rng.random() < 0.9 else "NA",
                    "sex": str(rng.choice(["f", "m", ""])),
                    "ward": str(rng.integers(1, 4)) if hospital == "bern" else str(rng.choice(["a", "b", "c"])),
                    "hospital": hospital,
                    "outcome": str(rng.choice(["1", "0", "1.0"] if hospital == "9" else ["2", "0"])),
                }
            )
    order = np.random.default_rng(1).permutation(len(rows))
    return [rows[i] for i in order]


def write_csv(path: Path, rows: list[dict[str, str]], without: str | None = None) -> None:
    names = [name for name in rows[0] if name != without]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def config_of(data: dict[str, Any], task: str | None = None) -> Any:
    return load_config({"rounds": 1, "seed": 3, "task": task, "data": data, "model": {"name": "mlp"}})


def agreed(sites: list[SiteData], scale: Any = None, rules: TableRules | None = None) -> DataSchema:
    """As the server does it, over text."""
    sent = [from_json(SiteSummary, to_json(site.summary()), "site") for site in sites]
    if mixed := mixed_columns(sent):
        sent = [from_json(SiteSummary, to_json(site.summary(mixed)), "site") for site in sites]
    return from_json(DataSchema, to_json(merged_schema(sent, rules or TableRules.of(scale))), "server")


def same_as_simulation(sites: dict[str, SiteData], data: Dataset, schema: DataSchema) -> None:
    assert schema.spec == data.spec
    for name, site in sites.items():
        samples = site.samples(schema)
        for split, everybody in data.splits().items():
            owners = getattr(data, "owners" if split == "train" else f"{split}_owners")
            own = everybody.take(np.flatnonzero(owners.astype(str) == name))
            assert torch.equal(samples[split].x, own.x) and torch.equal(samples[split].y, own.y), (name, split)


@pytest.mark.parametrize("keeps_column", [False, True])
@pytest.mark.parametrize("scale", [{"age": [50.0, 20.0]}, "standard", "per-client", None], ids=str)
def test_tables(keeps_column: bool, scale: Any, tmp_path: Path) -> None:
    rows = hospital_rows()
    write_csv(tmp_path / "all.csv", rows)
    node = {"name": "csv", "path": str(tmp_path / "all.csv"), "label": "outcome", "client": "hospital", "scale": scale}
    config = config_of({**node, "validation": 0.2})
    _, data = load_data(config)
    sites = {}
    for name in HOSPITALS:
        own = [row for row in rows if row["hospital"] == name]
        write_csv(tmp_path / f"{name}.csv", own, None if keeps_column else "hospital")
        sites[name] = read_site_data(str(tmp_path / f"{name}.csv"), name, config)
    schema = agreed([sites[name] for name in sorted(sites)], scale)
    same_as_simulation(sites, data, schema)
    assert schema.encoding is not None and data.encoding is not None
    assert schema.encoding.columns == data.encoding.columns


@pytest.mark.parametrize("kind", ["numbers", "names"])
def test_arrays(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    client = rng.integers(0, 4, 90)
    y = rng.choice([12, 5, 101, -3], 90) if kind == "numbers" else rng.choice(["cat", "dog", "10", "9"], 90)
    y[client == 2] = y[0]  # a client with one class
    x = rng.integers(0, 255, (90, 1, 4, 4)).astype(np.uint8) if kind == "names" else rng.normal(size=(90, 3))
    np.savez(tmp_path / "all.npz", x=x, y=y, client=client)
    config = config_of({"name": "npz", "path": str(tmp_path / "all.npz"), "validation": 0.25})
    _, data = load_data(config)
    sites = {}
    for k in range(4):
        np.savez(tmp_path / f"{k}.npz", x=x[client == k], y=y[client == k])
        sites[str(k)] = read_site_data(str(tmp_path / f"{k}.npz"), str(k), config)
    same_as_simulation(sites, data, agreed([*sites.values()]))


@pytest.mark.parametrize("label", ["days", ["days", "cost"]])
@pytest.mark.parametrize("scale", ["standard", "none"])
def test_tables_of_a_regression(label: Any, scale: str, tmp_path: Path) -> None:
    """Their labels are scaled by the sums of all sites, whether or not their columns are."""
    rng, rows = np.random.default_rng(4), hospital_rows()
    for row in rows:
        row["days"], row["cost"] = f"{rng.exponential(9):.1f}", str(rng.integers(10**5, 10**6))
    write_csv(tmp_path / "all.csv", rows)
    node = {"name": "csv", "path": str(tmp_path / "all.csv"), "label": label, "client": "hospital", "scale": scale}
    config = config_of({**node, "drop": ["outcome"], "validation": 0.2}, "regression")
    _, data = load_data(config)
    sites = {}
    for name in HOSPITALS:
        write_csv(tmp_path / f"{name}.csv", [row for row in rows if row["hospital"] == name], "hospital")
        sites[name] = read_site_data(str(tmp_path / f"{name}.csv"), name, config)
    schema = agreed([sites[name] for name in sorted(sites)], rules=rules_of(config))
    same_as_simulation(sites, data, schema)
    assert data.train.y.shape[1] == len(schema.targets) and schema.targets[0].spread == pytest.approx(9, rel=0.4)
    told = sites["bern"].summary()
    with pytest.raises(FedadcError, match=r"site bern does not tell the sums of .*days"):
        permitted(told, {"categories", "samples", "ranges"})


@pytest.mark.parametrize("given", [False, True])
def test_arrays_of_a_regression(given: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    client, x, y = rng.integers(0, 4, 90), rng.normal(size=(90, 3)), rng.normal([1e6, -3], [2e5, 0.1], size=(90, 2))
    np.savez(tmp_path / "all.npz", x=x, y=y, client=client)
    config = config_of({"name": "npz", "path": str(tmp_path / "all.npz"), "validation": 0.25}, "regression")
    _, data = load_data(config)
    constants: dict[str, Any] = {}
    if given:
        for name, key in (("target", "name"), ("target_center", "center"), ("target_spread", "spread")):
            constants[name] = np.array([getattr(target, key) for target in data.targets])
    sites = {}
    for k in range(4):
        np.savez(tmp_path / f"{k}.npz", x=x[client == k], y=y[client == k], **constants)
        sites[str(k)] = read_site_data(str(tmp_path / f"{k}.npz"), str(k), config)
    same_as_simulation(sites, data, agreed([*sites.values()]))
    told = sites["0"].summary()
    if given:
        assert permitted(told, set()).arrays == told.arrays
    else:
        with pytest.raises(FedadcError, match="site 0 does not tell the sums of its labels"):
            permitted(told, {"samples"})


GIVEN: dict[str, Any] = {"target": ["cost", "days"], "target_center": [1.0, 2.0], "target_spread": [3.0, 4.0]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_spread": None}, "it has target, target_center only"),
        ({"target_center": [1.0]}, "of one length"),
        ({"target_center": ["1", "2"]}, "texts, numbers and numbers above 0"),
        ({"target_spread": [1.0, 0.0]}, "a spread above 0"),
        ({"mean": ["a"]}, "numbers in scale, mean and std"),
        ({"scale": [[2.0]]}, "numbers in scale, mean and std"),
    ],
)
def test_constants_that_cannot_be_are_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    config = config_of({"name": "npz", "path": "x"}, "regression")
    constants = {name: value for name, value in {**GIVEN, **changes}.items() if value is not None}
    np.savez(tmp_path / "a.npz", x=np.ones((20, 3)), y=np.ones((20, 2)), **constants)
    with pytest.raises(FedadcError, match=sentence):
        read_site_data(str(tmp_path / "a.npz"), "a", config)


def test_a_site_that_does_not_fit_is_named(tmp_path: Path) -> None:
    config = config_of({"name": "npz", "path": "x"})
    for name, shape in (("a", (20, 3)), ("b", (20, 4))):
        np.savez(tmp_path / f"{name}.npz", x=np.ones(shape), y=np.arange(20) % 2)
    sites = [read_site_data(str(tmp_path / f"{name}.npz"), name, config) for name in "ab"]
    with pytest.raises(FedadcError, match=r"site b does not fit site a: it has inputs of shape \(4,\), not \(3,\)."):
        agreed(sites)
    with pytest.raises(FedadcError, match=r"site b has train inputs \[4\]"):
        sites[1].samples(agreed(sites[:1]))
