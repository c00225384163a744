"""Deadlines, quorums, sites that join, leave, are late or send nonsense: the trace gives the same bits again."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from direct_sites import CLIENTS, Interrupted, Unreliable, config_of, sites_of
from fedadc.errors import FedadcError, WorkersLost
from fedadc.runs.record import load_config, read_run
from fedadc.runs.runner import run
from fedadc.sites import connections, requests
from fedadc.sites.serving import recorded_terms, serve
from fedadc.sites.site import Site
from fedadc.sites.status import read_failure
from fedadc.training.trace import Trace

DEADLINE = 0.15


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connections, requests):
        monkeypatch.setattr(module, "LOOK_AGAIN", 0.003)


def config(
    folder: Path, sites: Collection[str] = CLIENTS, changes: Mapping[str, Any] | None = None, **settings: Any
) -> Any:
    given = {"sites": list(sites), "patience": 5, "deadline": DEADLINE, "quorum": 0.5, **settings}
    return config_of(folder, **{"rounds": 7, "cohort": {"ratio": 0.8}, "federation": given, **(changes or {})})


def repeated(folder: Path, settings: Any) -> Any:
    """The simulation that repeats the trace of the run in a folder; returns its last state."""
    data = {"name": "npz", "path": str(folder / "all.npz"), "test": 0.2}
    tree = {
        **settings.tree(),
        "data": data,
        "faults": {**settings.tree()["faults"], "trace": str(folder / "run/trace.jsonl")},
    }
    return run(load_config(tree), out=folder / "repeated").state


def require_repeated(folder: Path, settings: Any, sites: Collection[Site]) -> None:
    """The federation's models and states at the sites are those of the simulation."""
    state = repeated(folder, settings)
    for name in sorted(path.name for path in (folder / "repeated").glob("model*.safetensors")):
        assert (folder / "run" / name).read_bytes() == (folder / "repeated" / name).read_bytes(), name
    terms, by_name = recorded_terms(folder / "run"), {site.name: site for site in sites}
    for number, own in state.clients.items():
        kept = by_name[terms.names[number]].states(terms.run)[state.clients.counted(number)]
        assert own.keys() == kept.keys() and all(torch.equal(own[n], kept[n]) for n in own)
    for mine, theirs in zip(read_run(folder / "run").records, read_run(folder / "repeated").records, strict=True):
        for key in ("cohort", "train_loss", "joined", "absent", "dropped", "skipped"):
            assert mine.get(key) == theirs.get(key), (mine["round"], key)


FAULTS = ("late", "garbage", "truncated", "nan", "problem", "late once")
METHODS: dict[str, dict[str, Any]] = {
    "fedadc": {"method": "fedadc"},
    "scaffold": {"method": "scaffold"},
    "feddyn": {"method": "feddyn"},
    "moon": {"objective": "model_contrast"},
    "fedper": {"method": "fedper"},
    "top_k": {
        "method": "scaffold",
        "communication": {"uplink": "top_k"},
        "cohort": {"ratio": 0.8, "weighting": "samples"},
    },
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", METHODS)
def test_whatever_happens_the_trace_gives_the_same_bits(method: str, seed: int, site_arrays: Path) -> None:
    rng = random.Random(seed)
    settings = config(site_arrays, CLIENTS[2::-1], METHODS[method], open=True, quorum=0.01)
    faults = {(t, rng.choice(CLIENTS)): rng.choice(FAULTS) for t in range(1, 8)}
    here = {"dora": range(3, 9), "emil": (4, 5, 7), "anna": (1, 2, 4, 5, 6, 7)}
    sites = sites_of(site_arrays, settings)
    transport = Unreliable(sites, faults, here)
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    records = read_run(site_arrays / "run").records
    assert [r["joined"] for r in records if "joined" in r] and any("dropped" in r for r in records)
    assert records[2]["absent"] == [2]  # anna, the third of the roster
    assert recorded_terms(site_arrays / "run").names == ("carl", "bert", "anna", "dora", "emil")
    require_repeated(site_arrays, settings, sites)


def test_a_round_ends_at_its_deadline_with_a_quorum_and_names_who_is_late(site_arrays: Path) -> None:
    settings = config(site_arrays, changes={"cohort": {}, "rounds": 3})
    transport = Unreliable(sites_of(site_arrays, settings), {(1, "bert"): "late", (1, "dora"): "late"})
    began = time.monotonic()
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    assert time.monotonic() - began > DEADLINE
    first, second, _ = read_run(site_arrays / "run").records
    assert first["dropped"] == [1, 3] and "dropped" not in second
    said = "\n".join(first["events"])
    assert "round 1, site bert: it has not answered within 0.15 seconds; its upload is left out" in said
    assert any("the upload of round 1 of site bert came too late and is refused" in e for e in second["events"])
    require_repeated(site_arrays, settings, transport.sites.values())


def test_a_site_that_is_still_busy_holds_nobody_up(site_arrays: Path) -> None:
    class Slow(Unreliable):
        def after(self, record: Mapping[str, Any]) -> None:
            if record["round"] == 4:
                super().after(record)

    settings = config(site_arrays, deadline=3.0, changes={"cohort": {}, "rounds": 6})
    transport = Slow(sites_of(site_arrays, settings), {(1, "carl"): "late"})
    times: list[float] = []
    serve(
        settings, transport, site_arrays / "run", watch=lambda r: (times.append(time.monotonic()), transport.after(r))
    )
    records = read_run(site_arrays / "run").records
    assert [r["round"] for r in records if "dropped" in r] == [1, 2, 3, 4]
    assert [t for t, name in transport.asked if name == "carl"] == [1, 5, 6]
    assert "site carl: it is still busy with an earlier round" in "\n".join(records[2]["events"])
    assert times[3] - times[0] < 3.0  # the rounds in which it is busy do not wait for their deadlines
    require_repeated(site_arrays, settings, transport.sites.values())


def test_a_site_that_was_late_in_many_rounds_still_has_its_state(site_arrays: Path) -> None:
    """Its states of rounds that did not count are not taken for the one that the oldest checkpoint needs."""
    changes = {"cohort": {}, "rounds": 8, "method": "scaffold", "checkpoint": {"every": 1}}
    settings = config(site_arrays, changes=changes)
    transport = Unreliable(sites_of(site_arrays, settings), {(t, "bert"): "late" for t in range(2, 7)})
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    records = read_run(site_arrays / "run").records
    assert [r["round"] for r in records if "dropped" in r] == list(range(2, 7))
    require_repeated(site_arrays, settings, transport.sites.values())


def test_without_a_quorum_the_others_are_asked_again_and_their_first_answers_are_enough(site_arrays: Path) -> None:
    settings = config(site_arrays, quorum=1.0, retries=2, changes={"cohort": {}, "rounds": 2})
    transport = Unreliable(sites_of(site_arrays, settings), {(2, "anna"): "late once", (2, "emil"): "late once"})
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    assert [name for t, name in transport.asked if t == 2 and name in ("anna", "emil")] == ["anna", "emil"] * 2
    records = read_run(site_arrays / "run").records
    assert "3 of 5 sites have sent their upload of round 2 within 0.15 seconds, not" in "\n".join(records[1]["events"])
    require_repeated(site_arrays, settings, transport.sites.values())


def test_below_the_quorum_a_run_ends_with_a_checkpoint_and_goes_on_later(site_arrays: Path) -> None:
    settings = config(site_arrays, quorum=0.8, retries=1, changes={"cohort": {}, "checkpoint": {"every": 100}})
    sites, silent = sites_of(site_arrays, settings), {(4, name): "late" for name in CLIENTS[:2]}
    transport = Unreliable(sites, silent)
    wanted = r"3 of 5 sites have sent their upload of round 4 within 0\.15 seconds, not (anna, bert|bert, anna); 4 are"
    with pytest.raises(WorkersLost, match=wanted):
        serve(settings, transport, site_arrays / "run", watch=transport.after)
    failure = read_failure(site_arrays / "run")
    assert failure is not None and failure.exit_code == 6
    assert len(read_run(site_arrays / "run").records) == 3
    again = Unreliable(sites)
    serve(settings, again, site_arrays / "run", watch=again.after)
    assert [r["round"] for r in read_run(site_arrays / "run").records] == list(range(1, 8))
    require_repeated(site_arrays, settings, sites)


def test_uploads_that_cannot_be_used_do_not_count_for_the_quorum(site_arrays: Path) -> None:
    settings = config(site_arrays, quorum=0.8, changes={"cohort": {}})
    faults = {(2, "bert"): "garbage", (2, "emil"): "problem"}
    transport = Unreliable(sites_of(site_arrays, settings), faults)
    with pytest.raises(WorkersLost, match=r"4 of 5 sites|round 2: 3 of 5 uploads can be used, but 4 are needed"):
        serve(settings, transport, site_arrays / "run", watch=transport.after)
    assert len(read_run(site_arrays / "run").records) == 1


def test_a_server_that_is_killed_goes_on_with_the_sites_that_joined(site_arrays: Path) -> None:
    settings = config(site_arrays, CLIENTS[:3], open=True, changes={"method": "scaffold", "checkpoint": {"every": 2}})
    sites, here, deaths = sites_of(site_arrays, settings), {"dora": range(2, 9), "emil": range(4, 9)}, 0
    rounds = 1
    for limit in (16, 12, 15, 18, 1000):
        transport = Unreliable(sites, {(2, "anna"): "late", (5, "dora"): "nan"}, here)
        transport.limit, transport.round = limit, rounds
        try:
            serve(settings, transport, site_arrays / "run", watch=transport.after)
            break
        except Interrupted:
            deaths, rounds = deaths + 1, transport.round
    assert deaths >= 2
    trace = Trace.read(site_arrays / "run/trace.jsonl")
    assert len(trace.lines) == 7 and trace.names == ("anna", "bert", "carl", "dora", "emil") and len(trace.first) == 3
    require_repeated(site_arrays, settings, sites)


def test_a_site_that_does_not_fit_may_not_join_later(site_arrays: Path) -> None:
    import numpy as np

    settings = config(site_arrays, CLIENTS[:4], open=True)
    np.savez(site_arrays / "emil.npz", x=np.ones((9, 5)), y=np.arange(9) % 3)
    notes: list[str] = []
    transport = Unreliable(sites_of(site_arrays, settings), here={"emil": range(3, 9)})
    serve(settings, transport, site_arrays / "run", watch=transport.after, notes=notes.append)
    events = [event for r in read_run(site_arrays / "run").records for event in r.get("events", ())]
    refusals = [event for event in events if "emil" in event]
    assert len(refusals) == 1 and "inputs" in refusals[0]
    assert recorded_terms(site_arrays / "run").names == CLIENTS[:4]


def test_a_stranger_is_refused_by_a_federation_that_is_not_open(site_arrays: Path) -> None:
    settings = config(site_arrays, CLIENTS[:4])
    transport = Unreliable(sites_of(site_arrays, settings), {(3, "anna"): "late"}, here={"emil": range(2, 9)})
    serve(settings, transport, site_arrays / "run", watch=transport.after)
    events = [event for r in read_run(site_arrays / "run").records for event in r.get("events", ())]
    assert any("emil is not in federation.sites" in event for event in events)
    assert all(name != "emil" for _, name in transport.asked)


def test_a_run_may_go_on_while_sites_are_missing(site_arrays: Path) -> None:
    settings = config(site_arrays, quorum=0.6, changes={"cohort": {}, "checkpoint": {"every": 1}})
    sites = sites_of(site_arrays, settings)
    transport = Unreliable(sites)
    transport.limit = 30
    with pytest.raises(Interrupted):
        serve(settings, transport, site_arrays / "run", watch=transport.after)
    again = Unreliable(sites, here={"emil": ()})
    serve(settings, again, site_arrays / "run", watch=again.after)
    assert read_run(site_arrays / "run").records[-1]["dropped"] == [4]
    require_repeated(site_arrays, settings, sites)


def test_evaluation_and_the_end_do_not_wait_for_sites_that_have_left(site_arrays: Path) -> None:
    tuned = {"personalize": {"regularizers": ["none"], "epochs": 1}}
    settings = config(site_arrays, open=True, **tuned)
    transport = Unreliable(sites_of(site_arrays, settings), here={"bert": range(1, 4)})
    result = serve(settings, transport, site_arrays / "run", watch=transport.after)
    assert "test_accuracy" in result.history[-1]
    rows = (site_arrays / "run/personal/clients.csv").read_text()
    assert "carl" in rows and "bert" not in rows


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quorum": 0}, "quorum must be a share"),
        ({"quorum": 1.1}, "quorum must be a share"),
        ({"deadline": 0}, "deadline must be above 0"),
        ({"deadline": float("inf")}, "deadline must be above 0"),
        ({"retries": -1}, "retries must be in"),
        ({"open": True, "quorum": None}, "open needs a quorum"),
    ],
)
def test_limits_that_cannot_be(settings: dict[str, Any], sentence: str, site_arrays: Path) -> None:
    with pytest.raises(FedadcError, match=sentence):
        config(site_arrays, **settings)


def test_an_open_federation_needs_pull(site_arrays: Path) -> None:
    settings = config(site_arrays, open=True, changes={"communication": {"downlink": "broadcast"}})
    with pytest.raises(FedadcError, match="broadcast needs the same clients in every round"):
        serve(settings, Unreliable(sites_of(site_arrays, settings)), site_arrays / "run")


def test_a_trace_is_for_simulations(site_arrays: Path) -> None:
    settings = config(site_arrays, changes={"faults": {"trace": "trace.jsonl"}})
    with pytest.raises(FedadcError, match=r"faults\.trace repeats a federation in a simulation"):
        serve(settings, Unreliable(sites_of(site_arrays, settings)), site_arrays / "run")
