"""Sites that cannot take part: one sentence at the server, which names the site, and one at the site."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from direct_sites import CLIENTS, Direct, config_of, sites_of
from fedadc.errors import FedadcError, WorkersLost
from fedadc.sites.node import NodeSettings
from fedadc.sites.packets import Kind, Lost, Packet
from fedadc.sites.replies import reply
from fedadc.sites.serving import serve
from fedadc.sites.site import Site
from fedadc.sites.status import read_failure


class Recording(Direct):
    """Notes what sites are refused for."""

    def __init__(self, sites: Any) -> None:
        super().__init__(sites)
        self.refusals: list[tuple[str, str]] = []

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        if kind == "refuse":
            self.refusals.append((self.sites[node].name, str(packet.facts["reason"])))
            self.answers["refused"] = Packet()
            return "refused"
        return super().send(node, kind, packet)


def config(folder: Path, **settings: Any) -> Any:
    data = {"data": settings.pop("data")} if "data" in settings else {}
    return config_of(folder, federation={"sites": list(CLIENTS), "patience": 1, **settings}, **data)


def test_data_that_is_gone(site_arrays: Path) -> None:
    sites = sites_of(site_arrays, config(site_arrays))
    (site_arrays / "carl.npz").unlink()
    with pytest.raises(FedadcError, match=r"^site carl: .*carl.npz"):
        serve(config(site_arrays), Direct(sites), site_arrays / "run")
    assert not (site_arrays / "run").exists()


def test_data_that_does_not_fit(site_arrays: Path) -> None:
    np.savez(site_arrays / "dora.npz", x=np.ones((9, 5)), y=np.arange(9) % 3)
    with pytest.raises(
        FedadcError, match=r"site dora does not fit site anna: it has inputs of shape \(5,\), not \(6,\)"
    ):
        serve(config(site_arrays), Direct(sites_of(site_arrays, config(site_arrays))), site_arrays / "run")


def test_a_site_that_never_comes(site_arrays: Path) -> None:
    sites = [site for site in sites_of(site_arrays, config(site_arrays)) if site.name != "emil"]
    with pytest.raises(WorkersLost, match=r"^site emil did not connect within 1 seconds"):
        serve(config(site_arrays), Direct(sites), site_arrays / "run")


def test_a_name_that_is_not_in_the_roster(site_arrays: Path) -> None:
    sites = sites_of(site_arrays, config(site_arrays))
    shutil.copyfile(site_arrays / "emil.npz", site_arrays / "emile.npz")
    stranger = NodeSettings("emile", str(site_arrays / "emile.npz"), site_arrays / "kept/emile")
    transport = Recording([*(s for s in sites if s.name != "emil"), Site(stranger, config(site_arrays))])
    with pytest.raises(WorkersLost, match="site emil did not connect"):
        serve(config(site_arrays), transport, site_arrays / "run")
    assert transport.refusals == [("emile", "emile is not in federation.sites (anna, bert, carl, dora, emil).")]


def test_two_sites_with_one_name(site_arrays: Path) -> None:
    sites = sites_of(site_arrays, config(site_arrays))
    transport = Recording([*sites, sites[0]])
    with pytest.raises(FedadcError, match=f"two sites are called {sites[0].name}"):
        serve(config(site_arrays), transport, site_arrays / "run")
    assert [name for name, _ in transport.refusals] == [sites[0].name]


def test_more_sites_than_wanted(site_arrays: Path) -> None:
    with pytest.raises(FedadcError, match=r"5 sites are connected, but federation.sites is 3: anna, bert"):
        serve(config(site_arrays, sites=3), Direct(sites_of(site_arrays, config(site_arrays))), site_arrays / "run")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"data-path": "x.csv"}, "--node-config lacks client, the name"),
        ({"client": "bern"}, "--node-config lacks data-path, its data"),
        ({"client": "bern", "data-path": "/absent.csv"}, "site bern has no data: there is no /absent.csv"),
        ({"client": "../bern", "data-path": "/absent.csv"}, "client must be at most 64 characters, without slashes"),
        ({"client": "bern", "data_path": "x"}, "--node-config: setting 'data_path'"),
        (
            {"client": "bern", "data-path": "/", "allow": "rows"},
            "allow must have samples, loss, evaluation, categories, ranges, sums, label-counts, many-categories or no",
        ),
        ({"client": "bern", "data-path": "/", "keep": -1}, "keep must be between 0 and"),
    ],
)
def test_settings_of_a_node(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(FedadcError) as raised:
        NodeSettings.of(given, {})
    assert problem in str(raised.value)


def test_a_site_whose_state_is_lost_says_so(site_arrays: Path) -> None:
    """A method with client states cannot go on without them."""
    settings = config_of(site_arrays, method="scaffold", cohort={}, federation={"sites": list(CLIENTS), "patience": 5})
    rounds = 0

    def lose(record: dict[str, Any]) -> None:
        nonlocal rounds
        rounds += 1
        shutil.rmtree(site_arrays / "kept" / "bert")

    with pytest.raises(FedadcError, match=r"site bert: .*has no state of round 1"):
        serve(settings, Direct(sites_of(site_arrays, settings)), site_arrays / "run", watch=lose)
    assert rounds == 1


@pytest.mark.parametrize(
    ("allow", "drop", "told"), [("nothing", [], False), ("categories", [], True), ("", ["sex"], True)]
)  # fmt: skip
def test_a_site_tells_its_categories_only_if_it_may(allow: str, drop: list[str], told: bool, tmp_path: Path) -> None:
    (tmp_path / "bern.csv").write_text("age,sex,outcome\n" + "40,f,ill\n50,m,healthy\n" * 4)
    given = {"client": "bern", "data-path": str(tmp_path / "bern.csv"), "allow": allow, "folder": str(tmp_path)}
    data = {"name": "csv", "path": "bern.csv", "label": "outcome", "drop": drop, "scale": "none"}
    site = Site(NodeSettings.of(given, {}), config_of(tmp_path, data=data))
    answer = reply(site, "describe", Packet({"holds_out": True, "as_text": "[]"}))
    assert answer.facts.get("problem") == (
        None if told else "site bern does not tell the categories of sex, which their encoding needs; data.drop leaves "
        "columns out, or the site can allow it."
    )  # fmt: skip
    assert (b'"sex"' in answer.body) == (told and not drop) and b"50.0" not in answer.body


@pytest.mark.parametrize(("scale", "asked"), [("standard", True), ("per-client", False), ({"age": [40, 12]}, False)])
@pytest.mark.parametrize("allowed", [False, True])
def test_sums_are_told_only_for_standard_scaling_and_if_the_site_allows(
    scale: Any, asked: bool, allowed: bool, tmp_path: Path
) -> None:
    (tmp_path / "bern.csv").write_text("age,outcome\n" + "40,ill\n50,healthy\n" * 4)
    allow = "samples categories" + (" sums" if allowed else "")
    given = {"client": "bern", "data-path": str(tmp_path / "bern.csv"), "allow": allow, "folder": str(tmp_path)}
    data = {"name": "csv", "path": "bern.csv", "label": "outcome", "scale": scale}
    site = Site(NodeSettings.of(given, {}), config_of(tmp_path, data=data))
    answer = reply(site, "describe", Packet({"holds_out": False, "as_text": "[]"}))
    refused = asked and not allowed
    assert ("does not tell the sums of age, which scale: standard needs" in str(answer.facts.get("problem"))) == refused
    assert refused or (b'"sums":[8,360.0,200.0]' in answer.body) == asked


def tables(folder: Path, **further: str) -> list[Site]:
    """Sites with tables; `further` are lines of some of them."""
    for name in CLIENTS:
        (folder / f"{name}.csv").write_text(
            "age,sex,outcome\n" + "40,f,ill\n50,m,healthy\n" * 4 + further.get(name, "")
        )
    data = {"name": "csv", "path": "all.csv", "label": "outcome"}
    settings = config(folder, data=data)
    return [Site(NodeSettings(n, str(folder / f"{n}.csv"), folder / "kept" / n), settings) for n in CLIENTS]


def test_a_site_with_other_columns_is_named(tmp_path: Path) -> None:
    sites = tables(tmp_path)
    (tmp_path / "dora.csv").write_text("age,gender,outcome\n" + "40,f,ill\n50,m,healthy\n" * 4)
    with pytest.raises(
        FedadcError, match="site dora does not fit site anna: its columns differ: it lacks sex; it has g"
    ):
        serve(sites[0].config, Direct(sites), tmp_path / "run")


def test_a_class_that_a_single_site_has_is_told(tmp_path: Path) -> None:
    sites, notes = tables(tmp_path, carl="60,f,il\n" * 5), []
    serve(sites[0].config, Direct(sites), tmp_path / "run", notes=notes.append)
    assert "only site carl has the class il" in notes and not any("site anna" in note for note in notes)


@pytest.mark.parametrize("allow", ["categories", "categories many-categories"])
def test_texts_that_may_be_names_of_persons_are_not_told(allow: str, tmp_path: Path) -> None:
    rows = "".join(f"patient{k},{'ill' if k % 2 else 'healthy'}\n" for k in range(60))
    (tmp_path / "bern.csv").write_text("name,outcome\n" + rows)
    given = {"client": "bern", "data-path": str(tmp_path / "bern.csv"), "allow": allow, "folder": str(tmp_path)}
    site = Site(NodeSettings.of(given, {}), config_of(tmp_path, data={"name": "csv", "path": "x", "label": "outcome"}))
    answer = reply(site, "describe", Packet({"holds_out": True, "as_text": "[]"}))
    told = "many-categories" in allow
    assert (b"patient7" in answer.body) == told
    assert told or "48 different texts of column name, which may be names" in str(answer.facts["problem"])


def test_a_stranger_that_is_broken_stops_nobody(site_arrays: Path) -> None:
    settings = config(site_arrays, patience=5)
    broken = NodeSettings("stranger", str(site_arrays / "absent.npz"), site_arrays / "kept/stranger")
    transport = Direct([Site(broken, settings), *sites_of(site_arrays, settings)])
    assert serve(settings, transport, site_arrays / "run").state.round == settings.rounds


@pytest.mark.parametrize("package", ["fedadc", "torch"])
def test_a_site_with_another_version(package: str, site_arrays: Path) -> None:
    class Older(Direct):
        def receive(self, numbers: Any) -> Any:
            found = super().receive(numbers)
            return {n: replace(a, facts={**a.facts, package: "0.1"}) for n, a in found.items() if isinstance(a, Packet)}

    with pytest.raises(FedadcError, match=rf"has {package} 0.1, but the server has .*; install the same"):
        serve(config(site_arrays), Older(sites_of(site_arrays, config(site_arrays))), site_arrays / "run")


def test_a_site_that_is_lost_again_and_again(site_arrays: Path) -> None:
    class Losing(Direct):
        def send(self, node: int, kind: Kind, packet: Packet) -> str:
            number = super().send(node, kind, packet)
            if kind == "train" and self.sites[node].name == "bert":
                self.answers[number] = Lost("it was killed")
            return number

    settings = config(site_arrays, patience=1)
    settings = replace(settings, cohort=replace(settings.cohort, size=5))
    with pytest.raises(WorkersLost, match="site bert has not answered for 1 seconds"):
        serve(settings, Losing(sites_of(site_arrays, settings)), site_arrays / "run")
    failure = read_failure(site_arrays / "run")
    assert isinstance(failure, WorkersLost) and "site bert" in str(failure), "others can read why it ended"


def test_what_a_site_keeps_is_for_its_owner_only(site_arrays: Path) -> None:
    serve(config(site_arrays), Direct(sites_of(site_arrays, config(site_arrays))), site_arrays / "run")
    assert {path.stat().st_mode & 0o777 for path in (site_arrays / "kept").iterdir()} == {0o700}
