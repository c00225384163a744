"""`fedadc federation doctor`: what is wrong at the SuperLink and at the sites, all of it, before a run."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from direct_sites import CLIENTS, Direct, config_of, sites_of
from family import linux
from fedadc.errors import FedadcError
from fedadc.fields.plain import from_json, to_json
from fedadc.sites.doctor import Link, examine_federation
from fedadc.sites.examination import Examination, SiteCheck
from fedadc.sites.node import NodeSettings
from fedadc.sites.packets import Kind, Packet
from fedadc.sites.serving import examined
from fedadc.sites.site import Site
from federations import config_of as federation_config
from federations import parts_of


class Ailing(Direct):
    """A site that says something else of itself."""

    def __init__(self, sites: Collection[Site], ill: str, change: Callable[[SiteCheck], SiteCheck]) -> None:
        super().__init__(sites)
        self.ill, self.change = ill, change

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        number = super().send(node, kind, packet)
        if kind == "check" and self.sites[node].name == self.ill:
            said = self.answers[number]
            assert isinstance(said, Packet)
            self.answers[number] = Packet(body=to_json(self.change(from_json(SiteCheck, said.body, "it"))))
        return number


def config(folder: Path, **changes: Any) -> Any:
    return config_of(folder, federation={"sites": list(CLIENTS), "patience": 1}, **changes)


def problems(found: Examination) -> dict[str, list[str]]:
    return {site.name: site.problems for site in found.sites if site.problems}


def test_sites_that_are_ready(site_arrays: Path) -> None:
    settings = config(site_arrays)
    found = examined(settings, Direct(sites_of(site_arrays, settings)), print, within=2)
    assert found.healthy and [site.name for site in found.sites] == list(CLIENTS) and found.classes == tuple("0123")
    for site in found.sites:
        assert site.check is not None and site.check.shape == (6,) and site.check.sizes.keys() == {"train", "test"}
        assert abs(site.clock) < 1 and site.check.parameters == found.sites[0].check.parameters  # type: ignore[union-attr]
    assert not (site_arrays / "kept").exists(), "an examination keeps nothing"


def test_every_problem_is_found_at_once(site_arrays: Path) -> None:
    settings = config(site_arrays)
    sites = [site for site in sites_of(site_arrays, settings) if site.name != "emil"]
    np.savez(site_arrays / "bert.npz", x=np.ones((9, 5)), y=np.arange(9) % 3)
    (site_arrays / "carl.npz").unlink()
    stranger = NodeSettings("zoe", str(site_arrays / "dora.npz"), site_arrays / "kept/zoe")
    found = examined(settings, Direct([*sites, Site(stranger, settings)]), print, within=0.5)
    wrong = problems(found)
    assert wrong.keys() == {"bert", "carl", "emil", "zoe"} and not found.healthy
    assert wrong["bert"] == ["it does not fit site anna: it has inputs of shape (5,), not (6,)"]
    assert "carl.npz" in wrong["carl"][0] and wrong["emil"] == ["it did not connect within 0.5 seconds"]
    assert wrong["zoe"] == ["it is not in federation.sites"]
    ready = [site for site in found.sites if site.check is not None]
    assert [site.name for site in ready] == ["anna", "dora"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c: replace(c, time=c.time + 100), "its clock is 100 s ahead"),
        (lambda c: replace(c, time=c.time - 77), "its clock is 77 s behind"),
        (lambda c: replace(c, free_gb=0.2), "its disk has 0.2 GB left"),
        (lambda c: replace(c, machine=replace(c.machine, torch="1.0")), "torch 1.0"),
        (lambda c: replace(c, machine=replace(c.machine, fedadc="0.1")), "fedadc 0.1"),
        (lambda c: replace(c, agreement="0" * 64), "other settings or initial weights"),
    ],
)
def test_what_a_site_says(change: Any, problem: str, site_arrays: Path) -> None:
    settings = config(site_arrays)
    found = examined(settings, Ailing(sites_of(site_arrays, settings), "dora", change), print, within=2)
    assert problems(found).keys() == {"dora"} and problem in " ".join(problems(found)["dora"])


def test_a_model_that_does_not_fit_the_data(site_arrays: Path) -> None:
    settings = config(site_arrays, model={"name": "cnn"})
    found = examined(settings, Direct(sites_of(site_arrays, settings)), print, within=2)
    assert len(found.problems) == 1 and "[6]" in found.problems[0] and not problems(found)


def test_a_report_is_read_as_it_was_written(site_arrays: Path) -> None:
    settings = config(site_arrays)
    found = examined(settings, Direct(sites_of(site_arrays, settings)), print, within=2)
    found.write(site_arrays / "report.json")
    assert asdict(Examination.read(site_arrays / "report.json")) == asdict(found)


@pytest.fixture
def flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Flower's own config."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    return tmp_path / "config.toml"


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        (None, None, "there is no .*config.toml"),
        ("nonsense", None, "has no SuperLink"),
        ("[superlink]\ndefault = 'here'\n", None, "has no SuperLink 'here' with an address; it has none"),
        ("[superlink.there]\naddress = 'a:1'\n", "here", "has no SuperLink 'here' with an address; it has there"),
    ],
)
def test_a_link_that_flower_does_not_know(text: str | None, name: str | None, sentence: str, flower: Path) -> None:
    if text is not None:
        flower.write_text(text)
    with pytest.raises(FedadcError, match=sentence):
        Link.of(name)


def test_a_link_that_cannot_be_reached(flower: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        flower.write_text(f"[superlink]\ndefault='x'\n[superlink.x]\naddress='127.0.0.1:{port}'\ninsecure=true\n")
        assert f"127.0.0.1:{port} cannot be reached" in str(Link.of(None).problem())
    flower.write_text("[superlink.x]\naddress='nowhere'\ninsecure=true\n")
    assert "nowhere cannot be reached" in str(Link.of("x").problem())


@linux
@pytest.mark.federation
@pytest.mark.usefixtures("nothing_is_left")
def test_a_real_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    """Behind TLS: all is well; then a site is gone, and then the SuperLink does not have the certificate."""
    config = federation_config()
    with parts_of(config, tmp_path / "there", tls=True) as parts:
        federation = parts.federation
        monkeypatch.setenv("FLWR_HOME", str(federation.folder / "flower"))
        keys = federation.folder / "tls/sites"
        found = examine_federation(federation.app, None, 60, keys)
        assert found.healthy and [site.name for site in found.sites] == parts.names, found
        said = call("federation", "doctor", federation.app, "local", "--json")
        assert said.code == 0 and json.loads(said.out)["healthy"]
        parts.kill_site(parts.names[1])
        said = call("federation", "doctor", federation.app, "--within", "30")
        assert said.code == 6 and "site 1: it did not connect within 30 seconds" in said.err and "ready" in said.out
        (federation.folder / "tls/server.crt").replace(federation.folder / "tls/ca.crt")
        said = call("federation", "doctor", federation.app)
        assert said.code == 6 and "is not valid" in said.err
