"""Early stopping and the best model where the validation samples are at real sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from direct_sites import CLIENTS, Direct, config_of, served_by_mortals, sites_of
from fedadc.errors import FedadcError
from fedadc.runs.layout import BEST_MODEL, MODEL
from fedadc.runs.record import load_config, read_run
from fedadc.runs.runner import run
from fedadc.sites.serving import serve


def config(folder: Path, **changes: Any) -> Any:
    data = {"name": "npz", "path": str(folder / "all.npz"), "validation": 0.25, "test": 0.2}
    settings = {"rounds": 30, "data": data, "stop": {"patience": 2}, "checkpoint": {"every": 1}}
    return config_of(folder, **{**settings, "federation": {"sites": list(CLIENTS), "patience": 5}, **changes})


def outcome(out: Path) -> tuple[Any, ...]:
    records = [{k: v for k, v in r.items() if k not in ("seconds", "events") and not k.startswith("wire")}
               for r in read_run(out).records]  # fmt: skip
    return records, (out / MODEL).read_bytes(), (out / BEST_MODEL).read_bytes()


def test_a_federation_ends_where_its_simulation_and_its_trace_do(site_arrays: Path) -> None:
    settings = config(site_arrays)
    serve(settings, Direct(sites_of(site_arrays, settings)), site_arrays / "sites")
    last = read_run(site_arrays / "sites").records[-1]
    assert last["round"] < 30 and last["stopped"].startswith("validation_accuracy has not improved for 2 evaluations")
    run(settings, out=site_arrays / "simulated")
    assert outcome(site_arrays / "sites") == outcome(site_arrays / "simulated")
    tree = settings.tree()
    traced = {**tree, "faults": {**tree["faults"], "trace": str(site_arrays / "sites/trace.jsonl")}}
    repeated = run(load_config(traced), out=site_arrays / "repeated")
    assert repeated.state.round == last["round"] == repeated.config.rounds and not repeated.stopped
    assert outcome(site_arrays / "repeated")[1:] == outcome(site_arrays / "sites")[1:]


def test_servers_that_die_end_at_the_same_round_with_the_same_best_model(site_arrays: Path) -> None:
    settings = config(site_arrays, stop={"patience": 5})
    serve(settings, Direct(sites_of(site_arrays, settings)), site_arrays / "whole")
    mortals = sites_of(site_arrays, settings)
    died = served_by_mortals(settings, mortals, site_arrays / "mortal", [25, 30, 25, 10**6])
    assert died >= 2
    assert outcome(site_arrays / "mortal") == outcome(site_arrays / "whole")


def test_patience_without_validation_samples_at_the_sites_is_refused(site_arrays: Path) -> None:
    settings = config(site_arrays, data={"name": "npz", "path": str(site_arrays / "all.npz"), "test": 0.2})
    with pytest.raises(FedadcError, match=r"stop\.patience needs validation data"):
        serve(settings, Direct(sites_of(site_arrays, settings)), site_arrays / "sites")
    assert not (site_arrays / "sites/metrics.jsonl").exists()
