"""Sites that join or return during a run: who they are, what they say, and what happens if they say nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_bad_answers import Malicious, events
from test_quorum import config, require_repeated

from direct_sites import CLIENTS, Direct, Unreliable, sites_of
from fedadc.errors import FedadcError
from fedadc.runs.record import read_run
from fedadc.sites import connections, requests, serving
from fedadc.sites.examination import Examination
from fedadc.sites.journal import changed_line
from fedadc.sites.node import ALLOWED
from fedadc.sites.packets import Kind, Packet
from fedadc.sites.serving import examined, recorded_terms, serve
from fedadc.sites.site import Site
from fedadc.system.files import LOCK, file_lock


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connections, requests):
        monkeypatch.setattr(module, "LOOK_AGAIN", 0.003)


def test_a_newcomer_that_never_answers_keeps_out_no_other(site_arrays: Path) -> None:
    class Deaf(Malicious):
        def send(self, node: int, kind: Kind, packet: Packet) -> str:
            number = super().send(node, kind, packet)
            if kind == "agree" and self.sites[node].name == "dora":
                del self.answers[number]
            return number

    settings = config(site_arrays, CLIENTS[:3], open=True, quorum=0.01, changes={"cohort": {}})
    here = {"dora": range(2, 9), "emil": range(2, 9)}
    transport = Deaf(sites_of(site_arrays, settings), lambda site, kind, request, answer: answer, here=here)
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    assert recorded_terms(site_arrays / "run").names == (*CLIENTS[:3], "emil")
    require_repeated(site_arrays, settings, transport.sites.values())


@pytest.mark.parametrize("counts", [[1, 2], None, [-5, 100, 3, 4], [10**30, 1, 1, 1], [0, 0, 0, 0], [9, 9, 9, 9]])
def test_a_newcomer_with_label_counts_that_cannot_be(counts: Any, site_arrays: Path) -> None:
    def lie(site: Site, kind: Kind, request: Packet, answer: Packet) -> Packet:
        if site.name != "emil" or kind != "agree":
            return answer
        return replace(answer, body=json.dumps({**json.loads(answer.body), "label_counts": counts}).encode())

    changes = {"cohort": {"size": 3, "selection": "covering"}, "rounds": 4}
    settings = config(site_arrays, CLIENTS[:4], changes, open=True, quorum=0.01)
    transport = Malicious(sites_of(site_arrays, settings), lie, here={"emil": range(2, 9)})
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    assert recorded_terms(site_arrays / "run").names == CLIENTS[:4]
    assert "site emil tells label counts that cannot be" in events(site_arrays)


@pytest.mark.parametrize("package", ["fedadc", "torch"])
def test_a_site_that_returns_with_another_version_is_refused(package: str, site_arrays: Path) -> None:
    class Returning(Malicious):
        def after(self, record: Mapping[str, Any]) -> None:
            super().after(record)
            if record["round"] == 1:
                (node,) = [node for node, site in self.sites.items() if site.name == "bert"]
                self.sites[node + 1000] = self.sites.pop(node)

    def upgraded(site: Site, kind: Kind, request: Packet, answer: Packet) -> Packet:
        later = site.name == "bert" and kind == "hello" and transport.round > 1
        return replace(answer, facts={**answer.facts, package: "0.1"}) if later else answer

    settings = config(site_arrays, changes={"cohort": {}, "rounds": 3})
    transport = Returning(sites_of(site_arrays, settings), upgraded)
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    assert [r.get("dropped") for r in read_run(site_arrays / "run").records] == [None, [1], [1]]
    assert f"site bert has {package} 0.1, but the server has" in events(site_arrays)


def test_a_run_that_goes_on_from_an_older_checkpoint_leaves_a_trace_that_repeats_it(site_arrays: Path) -> None:
    """The newest checkpoint is damaged, and a site had joined after the older one."""

    class Stopped(BaseException):
        pass

    changes = {"cohort": {}, "method": "scaffold", "checkpoint": {"every": 1}}
    settings = config(site_arrays, CLIENTS[:3], changes, open=True, quorum=0.01)
    sites = sites_of(site_arrays, settings)

    def stop(record: Mapping[str, Any]) -> None:
        transport.after(record)
        if record["round"] == 4:
            raise Stopped

    transport = Unreliable(sites, here={"dora": range(4, 99), "emil": ()})
    with pytest.raises(Stopped):
        serve(settings, transport, site_arrays / "run", watch=stop)
    assert recorded_terms(site_arrays / "run").names == (*CLIENTS[:3], "dora")
    (site_arrays / "run/checkpoints/round-00000004.json").write_bytes(b"{}")
    again = Unreliable(sites, here={"emil": ()})
    again.round = 4
    serve(settings, again, site_arrays / "run", watch=again.after)
    assert [r["round"] for r in read_run(site_arrays / "run").records if "joined" in r] == [4]
    require_repeated(site_arrays, settings, sites)


def test_a_federation_that_stops_early_is_repeated_to_the_same_round(site_arrays: Path) -> None:
    """Whether it stops depends on who evaluates; the simulation has the test samples of all."""
    changes = {"cohort": {}, "rounds": 10, "local": {"epochs": 8, "batch_size": 8, "lr": 0.1}}
    here = {"bert": (1,), "dora": (1,)}
    found = set()
    for number, accuracy in enumerate((0.3, 0.42, 0.4565)):
        folder = site_arrays if not number else site_arrays / str(number)
        if number:
            folder.mkdir()
            for file in site_arrays.glob("*.npz"):
                (folder / file.name).write_bytes(file.read_bytes())
        settings = config(folder, changes={**changes, "stop": {"accuracy": accuracy}}, open=True, quorum=0.01)
        transport = Unreliable(sites_of(folder, settings), here=here)
        serve(settings, transport, folder / "run", watch=transport.after)
        require_repeated(folder, settings, transport.sites.values())
        found.add(len(read_run(folder / "run").records))
    assert len(found) > 1


def refusing(folder: Path, without: str, **changes: Any) -> tuple[Examination, str]:
    """What `doctor` finds where the sites do not allow a word, and why the run is refused."""
    settings = config(folder, quorum=None, deadline=None, changes=changes)
    allowed = tuple(word for word in ALLOWED if word != without)
    sites = [replace(s, settings=replace(s.settings, allows=allowed)) for s in sites_of(folder, settings)]
    found = examined(settings, Direct(sites), lambda note: None, within=2)
    with pytest.raises(FedadcError) as error:
        serve(settings, Direct(sites), folder / "run")
    return found, str(error.value)


def test_doctor_finds_what_sites_do_not_allow(site_arrays: Path) -> None:
    covering = {"cohort": {"size": 3, "selection": "covering"}}
    for number, (word, changes) in enumerate({"label-counts": covering, "samples": {}}.items()):
        found, refused = refusing(site_arrays, word, **changes)
        assert not found.healthy and found.sites[0].problems[0].split(",")[0] in refused, number


def test_doctor_finds_two_sites_of_one_name_and_examines_the_others(site_arrays: Path) -> None:
    settings = config(site_arrays, quorum=None, deadline=None)
    sites = sites_of(site_arrays, settings)
    found = examined(settings, Unreliable([*sites, sites[0]]), lambda note: None, within=1)
    twice = [report for report in found.sites if report.problems]
    assert [report.name for report in twice] == [sites[0].name] and "two sites are called" in twice[0].problems[0]
    assert all(report.check is not None for report in found.sites if report not in twice)


def test_a_server_waits_until_an_earlier_one_has_ended(site_arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "OTHER_ENDS", 0.1)
    settings = config(site_arrays, changes={"rounds": 1})
    transport = Direct(sites_of(site_arrays, settings))
    with (
        file_lock(site_arrays / f"run-server{LOCK}"),
        pytest.raises(FedadcError, match=r"another server is at work on .*run; end it"),
    ):
        serve(settings, transport, site_arrays / "run")
    assert not (site_arrays / "run-audit.jsonl").exists() and not (site_arrays / "run").exists()
    serve(settings, transport, site_arrays / "run")
    assert changed_line(site_arrays / "run-audit.jsonl") is None


def test_a_task_that_comes_again_is_answered_without_a_second_training(
    site_arrays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedadc.training.client import Client

    done: list[int] = []
    do = Client.do
    monkeypatch.setattr(Client, "do", lambda self, *task: (done.append(self.number), do(self, *task))[1])
    settings = config(site_arrays, quorum=1.0, retries=2, changes={"cohort": {}, "rounds": 2, "method": "scaffold"})
    transport = Unreliable(sites_of(site_arrays, settings), {(2, "anna"): "late once"})
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    assert transport.asked.count((2, "anna")) == 2 and len(done) == 10
    require_repeated(site_arrays, settings, transport.sites.values())
