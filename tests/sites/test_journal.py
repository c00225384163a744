"""What a federation tells while it works: lines, an audit file, a status, figures for Prometheus."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from commands import Call, fine, refused
from direct_sites import CLIENTS, Direct, Unreliable, config_of, served_by_mortals, sites_of
from fedadc.errors import FedadcError, WorkersLost
from fedadc.sites import connections, requests, status
from fedadc.sites.journal import AuditFile, append, audit_file, changed_line, log_file
from fedadc.sites.overview import federation_status
from fedadc.sites.prometheus import MetricsServer, exposition, split_address
from fedadc.sites.serving import recorded_terms, serve
from fedadc.sites.status import SiteStatus, Status, StatusFile, read_status, status_file

FAULTS = {(1, "bert"): "late", (2, "carl"): "garbage", (3, "dora"): "problem"}
SAMPLE = re.compile(r'^(fedadc_[a-z_]+)(?:\{(site|name)="((?:[^"\\]|\\.)*)"\})? (-?[0-9.e+-]+)$')


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connections, requests):
        monkeypatch.setattr(module, "LOOK_AGAIN", 0.003)
    monkeypatch.setattr(status, "WRITE_EVERY", 0.0)


def settings_of(folder: Path, **federation: Any) -> Any:
    given = {"sites": list(CLIENTS), "patience": 5, "deadline": 0.3, "quorum": 0.4, **federation}
    return config_of(folder, rounds=5, cohort={}, checkpoint={"every": 2}, federation=given)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def served(folder: Path, watch: Callable[[Any], None] = lambda record: None, **further: Any) -> Path:
    """A run in which three sites misbehave."""
    settings, out = settings_of(folder), folder / "run"
    transport = Unreliable(sites_of(folder, settings), FAULTS)

    def after(record: Any) -> None:
        transport.after(record)
        watch(record)

    serve(settings, transport, out, watch=after, **further)
    return out


def test_lines_have_the_run_the_round_and_the_site(site_arrays: Path) -> None:
    out = served(site_arrays)
    lines, run = lines_of(log_file(out)), recorded_terms(out).run
    assert {line["run"] for line in lines if line["event"] != "waiting"} == {run}
    about = [(line["round"], line.get("site"), line["event"]) for line in lines]
    for expected in [(1, "bert", "late"), (2, "carl", "refused"), (3, "dora", "problem"), (5, None, "round")]:
        assert expected in about, expected
    assert [site for _, site, event in about if event == "joined"] == list(CLIENTS)
    (first,) = [line for line in lines if line["event"] == "round" and line["round"] == 1]
    assert first["dropped"] == ["bert"] and first["counted"] == ["dora", "carl", "anna", "emil"]
    assert about[-1] == (5, None, "finished")


def test_a_run_that_fails_says_why_everywhere(site_arrays: Path) -> None:
    settings = settings_of(site_arrays, quorum=1.0)
    transport = Unreliable(sites_of(site_arrays, settings), FAULTS)
    with pytest.raises(WorkersLost, match="not bert; 5 are needed"):
        serve(settings, transport, site_arrays / "run", watch=transport.after)
    last, found = lines_of(audit_file(site_arrays / "run"))[-1], read_status(site_arrays / "run")
    assert last["event"] == "failed" and "5 are needed" in last["text"]
    assert found is not None and (found.state, found.exit_code) == ("failed", 6)


def test_the_audit_file_is_only_appended_to(site_arrays: Path) -> None:
    """Whatever kills the server."""
    settings, out = settings_of(site_arrays), site_arrays / "run"
    sites, audit, before = sites_of(site_arrays, settings), audit_file(out), b""
    for limit in (12, 17, 23, 1000):
        with suppress(AssertionError):
            served_by_mortals(settings, sites, out, [limit])
        now = audit.read_bytes()
        assert now.startswith(before) and len(now) > len(before)
        before = now
        append(audit, b"")  # an empty line changes nothing
        audit.write_bytes(now + b'{"time": "2026-')  # the last line is cut off
        before = audit.read_bytes()
    assert changed_line(audit) is None
    events = [json.loads(line)["event"] for line in before.splitlines() if line.endswith(b"}")]
    assert events.count("began") == 4 and events[-1] == "finished"


def test_a_change_of_the_audit_file_is_noticed(site_arrays: Path) -> None:
    audit = audit_file(served(site_arrays))
    lines = audit.read_bytes().splitlines(keepends=True)
    assert len(lines) > 10 and changed_line(audit) is None
    for number in range(len(lines) - 1):
        audit.write_bytes(
            b"".join([*lines[:number], lines[number].replace(b'"time": "2', b'"time": "3'), *lines[number + 1 :]])
        )
        assert changed_line(audit) == number + 2
        audit.write_bytes(b"".join([*lines[:number], *lines[number + 1 :]]))
        assert changed_line(audit) == number + 1
        audit.write_bytes(b"".join([*lines[:number], b"nonsense\n", *lines[number:]]))
        assert changed_line(audit) == number + 2
    audit.write_bytes(b"".join(lines))
    AuditFile(audit)({"event": "joined"})
    assert changed_line(audit) is None


def test_the_status_while_a_run_trains_and_afterwards(
    site_arrays: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Status] = []

    def look(record: Any) -> None:
        found = read_status(site_arrays / "run")
        assert found is not None
        seen.append(found)

    out = served(site_arrays, look)
    assert [(s.state, s.rounds) for s in seen] == [("running", 5)] * 5 and seen[-1].round >= 4
    now = federation_status(out).status
    assert (now.state, now.round, now.run) == ("finished", 5, recorded_terms(out).run)
    bert, anna = now.sites["bert"], now.sites["anna"]
    assert (bert.late, bert.refused, bert.counted, anna.late) == (1, 1, 5, 0) and anna.bytes_up > 5 * 400
    assert (now.sites["carl"].refused, now.sites["dora"].problems) == (1, 1)
    text = fine(call("federation", "status", str(out)))
    assert "finished, round 5 of 5, test_accuracy" in text and "dora: round 3, site dora: the disk is full" in text
    assert "run-audit.jsonl: all lines are as they were written" in text
    assert max(len(line.rstrip()) for line in text.splitlines() if "──" in line) <= 80
    told = json.loads(fine(call("federation", "status", str(out), "--json")))
    assert told["sites"]["bert"]["late"] == 1 and told["audit"]["changed_line"] is None
    refused(call("federation", "status", str(site_arrays)), "is not the run directory of a federation")


def test_a_server_that_was_killed_is_said_to_have_stopped(site_arrays: Path) -> None:
    settings, out = settings_of(site_arrays), site_arrays / "run"
    with pytest.raises(AssertionError):
        served_by_mortals(settings, sites_of(site_arrays, settings), out, [25])
    found = read_status(out)
    assert found is not None and found.state == "running"  # its process lives: this one
    found.process, found.updated = 2**22 + 1, 0.0  # beyond the largest number of a process
    StatusFile(status_file(out))(found)
    assert federation_status(out).status.state == "stopped"
    sent = found.sites["anna"].bytes_down
    assert sent > 0
    serve(settings, Direct(sites_of(site_arrays, settings)), out)
    assert federation_status(out).status.sites["anna"].bytes_down > sent, "figures go on where they were"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"sites": 3}', '{"sites": {}, "activity": {"kind": "x"}}', '{"sites": {"a": 1}}']
)
def test_a_status_file_that_is_damaged(text: str, tmp_path: Path) -> None:
    status_file(tmp_path / "run").write_text(text)
    assert read_status(tmp_path / "run") is None
    with pytest.raises(FedadcError, match="is not the run directory"):
        federation_status(tmp_path / "run")


def test_prometheus_can_ask_for_figures_while_a_run_trains(site_arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []
    plain = MetricsServer.__init__

    def noted(self: MetricsServer, address: str) -> None:
        plain(self, address)
        ports.append(self.port)

    monkeypatch.setattr(MetricsServer, "__init__", noted)
    texts: list[str] = []

    def scrape(record: Any) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/metrics", timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            texts.append(answer.read().decode())

    served(site_arrays, scrape, metrics="127.0.0.1:0")
    found = {(name, label): float(value) for name, _, label, value in samples_in(texts[-1])}
    assert found["fedadc_round", ""] == 5 and found["fedadc_sites_connected", ""] == 5
    assert found["fedadc_site_late_total", "bert"] == 1 and found["fedadc_site_refused_total", "carl"] == 1
    assert 0 < found["fedadc_metric", "test_accuracy"] < 1 and found["fedadc_site_connected", "anna"] == 1
    with pytest.raises(urllib.error.URLError):
        scrape(None)  # it has ended with the run


def samples_in(text: str) -> list[tuple[str, ...]]:
    """The samples of an exposition, each after the lines that say what it is."""
    described, found = set(), []
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            described.add(line.split()[2])
        elif not line.startswith("# HELP "):
            match = SAMPLE.match(line)
            assert match is not None and match[1] in described, line
            found.append(tuple(part or "" for part in match.groups()))
    return found


def test_names_of_sites_are_escaped_for_prometheus() -> None:
    own = Status(3, sites={'a "b"\\c\nd': SiteStatus(counted=2)})
    assert ("fedadc_site_counted_round", "site", 'a \\"b\\"\\\\c\\nd', "2") in samples_in(exposition(own))


def test_nothing_listens_unless_it_is_asked_for(site_arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricsServer, "__init__", lambda self, address: pytest.fail("it listens"))
    served(site_arrays)


def test_an_address_that_is_taken_does_not_stop_a_run(site_arrays: Path) -> None:
    other, notes = MetricsServer("0"), list[str]()
    out = served(site_arrays, metrics=str(other.port), notes=notes.append)
    other.close()
    assert any(f"metrics cannot be served at {other.port}" in note for note in notes)
    assert federation_status(out).status.finished


@pytest.mark.parametrize("address", ["here", "1:2:x", "127.0.0.1:70000", "²"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(FedadcError, match="metrics must be a port or host:port"):
        split_address(address)
    assert split_address("[::1]:9") == ("::1", 9) and split_address("9464") == ("127.0.0.1", 9464)
