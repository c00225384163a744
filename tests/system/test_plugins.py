"""Plugins of really installed packages: found by their metadata, imported only when a config names them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

import fedadc
from commands import Call, fine, refused
from fedadc.config.build import prepare
from fedadc.errors import FedadcError
from fedadc.runs.record import load_config
from own_code import MINE, TINY, trace

CODE = MINE.replace("import my_helper\n", "").replace("my_helper.GAIN", "2.0")
ENTRIES = {"methods": "slow_one = {m}.code:Slow", "models": "tiny_net = {m}:Net", "datasets": "my_dots = {m}.code:dots",
           "selections": "everybody = {m}.code:Everybody"}  # fmt: skip


def install(site: Path, name: str, entries: dict[str, str], version: str = "1.2") -> Path:
    """What pip leaves of a package: its modules and its metadata."""
    package, info = site / name, site / f"{name}-{version}.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(f"from {name}.code import Net\n")
    (package / "code.py").write_text(CODE)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"[fedadc.{group}]\n{text.format(m=name)}\n" for group, text in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return package


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in [n for n in sys.modules if n.startswith("plug_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "site"


def test_a_plugin_is_used_in_a_config_under_its_name(site: Path, tmp_path: Path) -> None:
    install(site, "plug_a", ENTRIES)
    tree = {
        **TINY,
        "method": {"name": "slow_one", "gain": 3.0},
        "model": "tiny_net",
        "data": {"name": "my_dots", "clients": 4},
        "cohort": {"size": 2, "selection": "everybody"},
    }
    result = fedadc.run(tree, out=tmp_path / "run", workers=2)
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (
        written["method"] == {"name": "slow_one", "gain": 3.0} and written["cohort"]["selection"]["name"] == "everybody"
    )
    assert written["model"]["name"] == "tiny_net" and written["data"]["name"] == "my_dots"
    assert not (tmp_path / "run/seal.json").exists()  # what is installed is the user's own choice
    assert len(fedadc.resume(tmp_path / "run", "rounds=2").history) == 2
    assert load_config(result.config.tree()) == result.config


def test_a_class_that_its_package_passes_on_is_written_under_its_name(site: Path) -> None:
    package = install(site, "plug_b", {"methods": "passed_on = plug_b:Slow"})
    (package / "__init__.py").write_text("from plug_b.code import Slow\n")
    config = load_config({**TINY, "method": "passed_on"})
    assert config.tree()["method"]["name"] == "passed_on"


def test_listing_imports_nothing(site: Path, call: Call) -> None:
    package = install(site, "plug_c", ENTRIES | {"partitions": "odd = {m}:Odd", "objectives": "odd = {m}:Odd"})
    for what, name in (("methods", "slow_one"), ("models", "tiny_net"), ("datasets", "my_dots"), ("partitions", "odd"),
                       ("selections", "everybody"), ("objectives", "odd")):  # fmt: skip
        assert "plug_c 1.2" in fine(call("list", what)) and name in fine(call("list", what))
        (entry,) = [e for e in json.loads(fine(call("list", what, "--json"))) if e["name"] == name]
        assert entry["summary"] == "plugin of plug_c 1.2" and entry["settings"] == {}
    assert "plug_c" not in sys.modules and trace(package) == []
    refused(call("run", "small.yaml", "method=slow_won"), "did you mean 'slow_one'?")
    refused(call("run", "small.yaml", "method=everybody"), "unknown")  # of another kind
    assert trace(package) == []
    prepare(load_config({**TINY, "method": "slow_one"}))
    assert trace(package) == ["plug_c.code"]


def test_two_packages_with_one_name_are_refused(site: Path, call: Call) -> None:
    packages = [install(site, name, {"methods": "slow_one = {m}.code:Slow"}) for name in ("plug_d", "plug_e")]
    with pytest.raises(FedadcError, match=r"slow_one is declared by plug_d 1\.2 and plug_e 1\.2"):
        load_config({**TINY, "method": "slow_one"})
    assert "plug_d 1.2 and plug_e 1.2" in " ".join(fine(call("list", "methods", "--json")).split())
    assert not any(map(trace, packages))


def test_a_built_in_wins_over_a_plugin(site: Path, call: Call) -> None:
    package = install(site, "plug_f", {"methods": "fedavg = {m}.code:Slow", "datasets": "digits = {m}.code:dots"})
    assert type(load_config({**TINY, "method": "fedavg"}).method) is fedadc.methods.FedAvg
    assert len(prepare(load_config(TINY)).federation.data.classes) == 10
    assert "the built-in one" in fine(call("list", "methods", "--json")) and trace(package) == []


def test_a_file_wins_over_a_plugin_with_a_colon(site: Path, tmp_path: Path) -> None:
    package = install(site, "plug_g", {"methods": "mine:Slow = {m}.code:Slow"})
    with pytest.raises(FedadcError, match=r"there is no mine\.py"):
        load_config({**TINY, "method": "mine:Slow"}, folder=tmp_path)
    assert trace(package) == []


@pytest.mark.parametrize(
    ("entry", "fragment"),
    [
        ("bad = plug_h.code:Net", "is not a class derived from Method"),
        ("bad = plug_h.code:dots", "is not a class derived from Method"),
        ("bad = plug_h.code:Missing", "the plugin bad of plug_h 1.2 failed"),
        ("bad = plug_h.absent:Slow", "the plugin bad of plug_h 1.2 failed"),
        ("bad = plug_h", "is not a class derived from Method"),
    ],
)
def test_a_plugin_that_is_none_is_one_sentence(site: Path, entry: str, fragment: str) -> None:
    install(site, "plug_h", {"methods": entry})
    with pytest.raises(FedadcError) as caught:
        load_config({**TINY, "method": "bad"})
    assert fragment in str(caught.value)
