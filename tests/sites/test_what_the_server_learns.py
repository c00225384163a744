"""All that the server of a federation learns of a site: each item is listed here, and most can be switched off."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize

from direct_sites import CLIENTS, Direct, config_of, sites_of
from fedadc.errors import FedadcError
from fedadc.runs.record import read_run
from fedadc.sites.node import ALLOWED, ALLOWED_BY_DEFAULT, NodeSettings
from fedadc.sites.packets import HEADER_LENGTH, Kind, Lost, Packet
from fedadc.sites.serving import serve
from fedadc.sites.site import Site
from fedadc.system.version import __version__

STEPS = {"local": {"steps": 3, "batch_size": 8, "lr": 0.1}}


class Overhearing(Direct):
    """Keeps all that sites have said, by their names: (kind of the request, answer)."""

    def __init__(self, sites: Collection[Site]) -> None:
        super().__init__(sites)
        self.said: dict[str, list[tuple[Kind, Packet]]] = {}
        self._asked: dict[str, tuple[str, Kind]] = {}

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        number = super().send(node, kind, packet)
        self._asked[number] = self.sites[node].name, kind
        return number

    def receive(self, numbers: Collection[str]) -> Mapping[str, Packet | Lost]:
        found = super().receive(numbers)
        for number, answer in found.items():
            name, kind = self._asked[number]
            assert isinstance(answer, Packet)
            self.said.setdefault(name, []).append((kind, answer))
        return found


def overheard(folder: Path, allow: Collection[str], changes: Mapping[str, Any] | None = None) -> Overhearing:
    """A whole run with sites that allow this, and what they have said in it."""
    config = config_of(folder, federation={"sites": list(CLIENTS), "patience": 5}, **{**STEPS, **(changes or {})})
    sites = [replace(site, settings=replace(site.settings, allows=tuple(allow))) for site in sites_of(folder, config)]
    transport = Overhearing(sites)
    serve(config, transport, folder / "run")
    return transport


def told(transport: Overhearing, kind: Kind) -> dict[str, Any]:
    """The first answer of every site to a kind of request: its body as JSON."""
    return {n: json.loads(next(p.body for k, p in said if k == kind)) for n, said in transport.said.items()}


def headers(transport: Overhearing) -> list[dict[str, Any]]:
    """The headers of all uploads."""
    uploads = [packet for said in transport.said.values() for kind, packet in said if kind == "train"]
    return [json.loads(json.loads(p.head[HEADER_LENGTH:])["__metadata__"]["fedadc"]) for p in uploads]


def test_all_that_is_told_by_default(site_arrays: Path) -> None:
    transport = overheard(site_arrays, ALLOWED_BY_DEFAULT)
    kinds = {kind for said in transport.said.values() for kind, _ in said}
    assert kinds == {"hello", "agree", "train", "count", "finish"}
    for name, said in transport.said.items():
        for kind, packet in said:
            facts = {"hello": {"client", "fedadc", "torch"}, "agree": {"fedadc", "torch"}}.get(kind, set())
            assert set(packet.facts) == facts, (name, kind)
            if kind == "count":
                counts = dict(deserialize(packet.body))
                assert set(counts) == {"test.loss", "test.top5", "test.confusion"}
            assert kind != "finish" or not packet.size
    arrays = {"shape", "dtype", "normalization", "classes", "integers", "targets", "sums"}
    for name, found in told(transport, "hello").items():
        assert set(found) == {"client", "rows", "table", "arrays"} and set(found["arrays"]) == arrays
        assert found["client"] == name and found["table"] is None
        assert not found["arrays"]["targets"] and not found["arrays"]["sums"], "of regressions only"
    for found in told(transport, "agree").values():
        assert set(found) == {"sizes", "label_counts", "data", "agreement"}
        assert found["label_counts"] is None and set(found["sizes"]) == {"train", "test"}
    own = {"version", "kind", "agreement", "round", "client", "loss", "finite", "keeps_state"}
    assert all(set(header) == own and header["loss"] > 0 for header in headers(transport))
    record = read_run(site_arrays / "run").records[-1]
    assert record["test_accuracy"] is not None and record["train_loss"] is not None


def test_a_site_that_allows_nothing_tells_nothing_that_depends_on_its_samples_but_uploads(site_arrays: Path) -> None:
    """Two federations whose sites have other samples, in other numbers: the same messages but for uploads.

    A checksum of the samples is told too, so that a run does not go on with others. Classes and shapes are the same.
    """
    first = overheard(site_arrays, ())
    rng = np.random.default_rng(5)
    other = site_arrays / "other"
    other.mkdir()
    for number, name in enumerate(CLIENTS):
        y = np.concatenate([np.load(site_arrays / f"{name}.npz")["y"], rng.choice(4, 30 + 7 * number)])
        np.savez(other / f"{name}.npz", x=rng.normal(size=(len(y), 6)) + 3, y=y)
    second = overheard(other, ())
    for name in CLIENTS:
        kinds = [kind for kind, _ in first.said[name]]
        assert kinds == [kind for kind, _ in second.said[name]] and "count" not in kinds
        for (kind, mine), (_, theirs) in zip(first.said[name], second.said[name], strict=True):
            assert mine.facts == theirs.facts and mine.head == theirs.head, kind
            if kind == "agree":
                assert {**json.loads(mine.body), "data": ""} == {**json.loads(theirs.body), "data": ""}
            elif kind != "train":
                assert mine.body == theirs.body, kind
    assert [header["loss"] for header in headers(first)] == [None] * len(headers(first)) and headers(first)
    record = read_run(site_arrays / "run").records[-1]
    assert record["train_loss"] is None and "test_accuracy" not in record


@pytest.mark.parametrize(
    ("without", "changes", "sentence"),
    [
        ("samples", {"local": {"epochs": 1}}, "does not tell its number of samples, on which local.epochs depends"),
        ("samples", {"cohort": {"weighting": "samples"}}, "on which cohort.weighting depends"),
        ("samples", {"method": {"name": "feddyn", "alpha_by_size": True}}, "on which the method depends"),
        ("label-counts", {"cohort": {"size": 3, "selection": "covering"}}, "does not tell its label counts, which the"),
        ("label-counts", {"evaluate": {"metrics": ["per_class"]}}, "does not tell the labels of its test samples"),
    ],
)
def test_what_a_run_needs_and_a_site_does_not_tell_is_named(
    without: str, changes: dict[str, Any], sentence: str, site_arrays: Path
) -> None:
    with pytest.raises(FedadcError, match=rf"^site \w+ .*{sentence}"):
        overheard(site_arrays, [name for name in ALLOWED if name != without], changes)
    assert not (site_arrays / "run").exists()


@pytest.mark.parametrize("without", ["loss", "evaluation", "samples"])
def test_each_can_be_switched_off(without: str, site_arrays: Path) -> None:
    transport = overheard(site_arrays, [name for name in ALLOWED if name != without])
    assert all((header["loss"] is None) == (without == "loss") for header in headers(transport))
    sizes = {tuple(found["sizes"]) for found in told(transport, "agree").values()}
    assert sizes == {{"loss": ("train", "test"), "evaluation": ("train",), "samples": ()}[without]}
    rows = {found["rows"] for found in told(transport, "hello").values()}
    assert (rows == {0}) == (without == "samples")
    counted = any(kind == "count" for said in transport.said.values() for kind, _ in said)
    assert counted == (without == "loss")


def test_label_counts_are_told_only_if_a_selection_needs_them(site_arrays: Path) -> None:
    transport = overheard(site_arrays, ALLOWED, {"cohort": {"size": 3, "selection": "covering"}})
    for name, found in told(transport, "agree").items():
        assert sum(found["label_counts"]) == found["sizes"]["train"], name


def test_labels_of_test_samples_are_told_only_if_a_metric_needs_them(site_arrays: Path) -> None:
    """Else the table of counts has who is right and who is wrong, and no label."""

    def tables(transport: Overhearing) -> list[Any]:
        bodies = [packet.body for said in transport.said.values() for kind, packet in said if kind == "count"]
        found = [dict(deserialize(body))["test.confusion"] for body in bodies]
        return [np.frombuffer(table["data"], dtype=np.int64).reshape(table["shape"]) for table in found]

    plain = tables(overheard(site_arrays, ALLOWED))
    assert all((table[1:] == 0).all() and (table[0, 1:-1] == 0).all() for table in plain)
    (site_arrays / "run").rename(site_arrays / "before")
    whole = tables(overheard(site_arrays, ALLOWED, {"evaluate": {"metrics": ["per_class", "macro_f1"]}}))
    assert [np.trace(table) for table in plain] == [np.trace(table) for table in whole]
    assert any((table[1:] > 0).any() for table in whole)


@pytest.mark.parametrize("samples", [True, False])
def test_a_table_without_numbers_of_samples(samples: bool, tmp_path: Path) -> None:
    """Columns still say whether they have numbers, texts or gaps, which their encoding needs, but not how many."""
    (tmp_path / "bern.csv").write_text("age,sex,outcome\n" + "40,f,ill\n,m,healthy\n" * 9)
    allow = "categories" + " samples" * samples
    given = {"client": "bern", "data-path": str(tmp_path / "bern.csv"), "allow": allow, "folder": str(tmp_path)}
    data = {"name": "csv", "path": "bern.csv", "label": "outcome", "scale": "none"}
    site = Site(NodeSettings.of(given, {}), config_of(tmp_path, data=data))
    found = json.loads(site.describe(Packet({"holds_out": True, "as_text": "[]"})).body)
    numbers = [found["rows"], found["table"]["rows"]]
    numbers += [column[key] for column in found["table"]["columns"].values() for key in ("numbers", "texts", "missing")]
    assert (max(numbers) <= 1) != samples


def test_versions_are_told(site_arrays: Path) -> None:
    transport = overheard(site_arrays, ())
    assert {packet.facts["fedadc"] for kind, packet in transport.said["anna"] if kind == "hello"} == {__version__}
