"""The end of a federation: the sites get the final model, and tune it as `fedadc personalize` does in a simulation."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from direct_sites import CLIENTS, Direct, config_of, sites_of
from fedadc.errors import FedadcError
from fedadc.fields.plain import to_json
from fedadc.personal import personal_state_dict, personalize
from fedadc.runs.record import load_config
from fedadc.runs.runner import run
from fedadc.sites.packets import Kind, Packet
from fedadc.sites.serving import serve
from fedadc.sites.tuning import TunedTotals

PERSONAL = {
    "calibrated": ("fedadc", {"regularizers": ["none", "prox"], "mu": 0.1, "epochs": 3}),
    "whole model": ("scaffold", {"layers": "all", "lr": 0.02}),
    "own head": ("fedper", {}),
    "no global model": ("local_only", {}),
}


@pytest.mark.parametrize("case", PERSONAL)
def test_sites_have_the_personal_models_of_the_simulation(case: str, site_arrays: Path) -> None:
    method, settings = PERSONAL[case]
    config = config_of(site_arrays, method=method, federation={"sites": list(CLIENTS), "personalize": settings})
    run(
        load_config({**config.tree(), "data": {"name": "npz", "path": str(site_arrays / "all.npz")}}),
        out=site_arrays / "here",
    )
    personalize(site_arrays / "here", **settings)
    sites = sites_of(site_arrays, config)
    serve(config, Direct(sites), site_arrays / "there")
    for name in ("clients.csv", "personal.png"):
        assert (site_arrays / "there/personal" / name).is_file()
    here, there = (
        list(csv.DictReader((site_arrays / f"{name}/personal/clients.csv").open())) for name in ("here", "there")
    )
    assert here == there
    assert not list((site_arrays / "there/personal").glob("*/*.safetensors")), "a personal model has left its site"
    for site in sites:
        (folder,) = (path for path in site.settings.folder.iterdir())
        number = CLIENTS.index(site.name)
        if method != "local_only":
            assert (folder / "model.safetensors").read_bytes() == (site_arrays / "here/model.safetensors").read_bytes()
        for variant in settings.get("regularizers", [None]):
            mine = personal_state_dict(folder, number, variant)
            expected = personal_state_dict(site_arrays / "here", number, variant)
            assert mine.keys() == expected.keys() and all(torch.equal(mine[n], expected[n]) for n in mine)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_own_models_of_a_regression(method: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    client, x = rng.choice(np.array(CLIENTS), 120), rng.normal(size=(120, 6))
    for name, chosen in {"all": np.full(120, True), **{name: client == name for name in CLIENTS}}.items():
        y = 300 + 50 * x[chosen] @ np.arange(6)
        owner = {"client": client} if name == "all" else {}
        np.savez(tmp_path / f"{name}.npz", x=x[chosen], y=y, **owner)
    config = config_of(
        tmp_path, task="regression", method=method, federation={"sites": list(CLIENTS), "personalize": {}}
    )
    run(load_config({**config.tree(), "federation": None}), out=tmp_path / "here")
    (row,) = personalize(tmp_path / "here").rows
    serve(config, Direct(sites_of(tmp_path, config)), tmp_path / "there")
    here, there = (list(csv.DictReader((tmp_path / f"{n}/personal/clients.csv").open())) for n in ("here", "there"))
    assert here == there and float(here[0]["personal_mse"]) < float(here[0]["global_mse"])
    assert row.metric == "mse" and row.figures().clients == len(CLIENTS)


def test_a_finished_run_is_personalized_later(site_arrays: Path) -> None:
    settings: dict[str, Any] = {"sites": list(CLIENTS)}
    config = config_of(site_arrays, method="fedadc", federation=settings)
    serve(config, Direct(sites_of(site_arrays, config)), site_arrays / "run")
    assert not (site_arrays / "run/personal").exists()
    config = config_of(site_arrays, method="fedadc", federation={**settings, "personalize": {"epochs": 1}})
    serve(config, Direct(sites_of(site_arrays, config)), site_arrays / "run")
    assert json.loads((site_arrays / "run/personal/summary.json").read_text())["settings"]["epochs"] == 1


def test_settings_that_no_site_could_follow_are_refused_first(site_arrays: Path) -> None:
    config = config_of(site_arrays, federation={"sites": 5, "personalize": {"regularizers": ["ridge"]}})
    with pytest.raises(FedadcError, match=r"regularizer 'ridge'"):
        serve(config, Direct([]), site_arrays / "run")


class Boasting(Direct):
    """One of its sites claims more than can be."""

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        number = super().send(node, kind, packet)
        if kind == "finish" and self.sites[node].name == "bert":
            self.answers[number] = Packet(body=to_json(TunedTotals({"none": 10**6})))
        return number


def test_counts_that_cannot_be_are_left_out(site_arrays: Path) -> None:
    config = config_of(site_arrays, method="fedadc", federation={"sites": list(CLIENTS), "personalize": {}})
    serve(config, Boasting(sites_of(site_arrays, config)), site_arrays / "run")
    rows = (site_arrays / "run/personal/clients.csv").read_text()
    assert "bert" not in rows and all(name in rows for name in CLIENTS if name != "bert")
    assert "site bert sent figures of its own models that cannot be" in (site_arrays / "run-audit.jsonl").read_text()
