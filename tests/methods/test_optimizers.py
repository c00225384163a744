"""Every method with Adam at its clients: it trains by the same rules as with SGD, or it says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import small_federation, updated
from direct_sites import CLIENTS, Direct, config_of, sites_of
from fedadc.config.build import prepare
from fedadc.errors import CannotResume, FedadcError
from fedadc.federation import Federation
from fedadc.methods import METHODS, FedAvg, FedBABU
from fedadc.models import MLP
from fedadc.optimizers import Adam, AdamW
from fedadc.runs.record import load_config
from fedadc.runs.runner import resume, run
from fedadc.sites.serving import recorded_terms, serve
from fedadc.training.faults import Faults
from fedadc.views.local_work import LocalWork
from snapshots import CONFIG, outcome, run_with_snapshots

REASONS = {  # of the methods that need the steps of SGD
    "fedadc": "made of gradients",
    "fedadc_double": "made of gradients",
    "scaffold": "the mean gradient of a round",
    "ditto": "trains two models",
    "fedrep": "one part of the model after the other",
    "fednova": "known for SGD alone",
}
ALLOWED = [name for name in METHODS if name not in REASONS]
KEPT = LocalWork(steps=3, batch_size=4, lr=0.02, weight_decay=0.01, optimizer=Adam(moments="client"))


def federation(method: Any, work: LocalWork = KEPT, **settings: Any) -> Federation:
    torch.manual_seed(0)
    module = MLP((5,), 4, [6]).double()
    return Federation(model=module, data=small_federation(), method=method, local=work, cohort=3, **settings)


def test_every_method_that_is_refused_says_why() -> None:
    refusing = {name for name, cls in METHODS.items() if cls.sgd_only}
    assert refusing == REASONS.keys() & METHODS.keys()
    for name in refusing:
        words = (
            f"method {METHODS[name].__name__.lower()} needs the steps of SGD: .*{REASONS[name]}.*local.optimizer to sgd"
        )
        with pytest.raises(FedadcError, match=words):
            federation(METHODS[name]())


@pytest.mark.parametrize("optimizer", [Adam(), AdamW(moments="client")])
@pytest.mark.parametrize("name", ALLOWED)
def test_the_others_train_and_overwrite_nothing(name: str, optimizer: Any) -> None:
    """A direction is invalid after the next call (here: NaN); what a client has kept is never written."""
    cls, decay = METHODS[name], 0.0 if name == "feddyn" else 0.01
    work = LocalWork(steps=3, batch_size=4, lr=0.02, weight_decay=decay, optimizer=optimizer)

    class Poisoned(cls):  # type: ignore[misc, valid-type]
        def step(self, theta: Any, grad: Any, local: Any) -> Any:
            def poisoning(point: Any) -> Any:
                if "last" in local.scratch:
                    local.scratch["last"].fill_(float("nan"))
                local.scratch["last"] = grad(point)
                return local.scratch["last"]

            return super().step(theta, poisoning, local)

    plain, poisoned = (list(federation(kind(), work).rounds(4)) for kind in (cls, Poisoned))
    last = plain[-1].state
    assert torch.isfinite(last.theta).all() and torch.equal(last.theta, poisoned[-1].state.theta)
    by_sgd = list(federation(cls(), LocalWork(steps=3, batch_size=4, lr=0.02, weight_decay=decay)).rounds(4))[-1].state
    trained = [s["model"] for s in last.clients.values()] if name == "local_only" else [last.theta]
    assert not torch.equal(trained[0], by_sgd.theta)
    kept = {"adam_m", "adam_v", "adam_steps"} if optimizer.moments == "client" else set()
    for client, own in last.clients.items():
        assert {n for n in own if n.startswith("adam")} == kept
        rounds = sum(client in result.cohort for result in plain)
        assert not kept or own["adam_steps"].tolist() == [3 * rounds]


def test_a_client_that_is_not_counted_keeps_its_moments_as_they_were() -> None:
    for result in federation(FedAvg(), faults=Faults(drop=0.5)).rounds(6):
        counted = set(result.cohort) - set(result.dropped)
        for client, own in result.state.clients.items():
            last = result.state.clients.counted(client)
            assert int(own["adam_steps"]) > 0 and (last == result.round) == (client in counted)


def test_the_head_of_fedbabu_stays_where_it_is() -> None:
    for optimizer in (Adam(), AdamW()):
        own = federation(FedBABU(), LocalWork(steps=3, batch_size=4, lr=0.02, weight_decay=0.1, optimizer=optimizer))
        head, start = own.model.part("head"), own.start().theta
        delta = updated(own, 1, 0.02, start, 2, 3).upload["delta"]
        assert not delta[head].any() and delta[own.model.part("embed")].any()


def test_decoupled_decay_is_refused_where_the_loss_must_have_it() -> None:
    with pytest.raises(FedadcError, match="method feddyn needs weight decay in the loss"):
        federation(METHODS["feddyn"](), LocalWork(weight_decay=0.1, optimizer=AdamW()))


# --- bits ------------------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    **CONFIG,
    "method": {"name": "fedprox", "mu": 0.1},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.01, "optimizer": {"name": "adamw", "moments": "client"},
              "weight_decay": 0.01},
    "faults": {"drop": 0.3},
}  # fmt: skip


def test_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    for workers in (0, 1, 2):
        run(RUN, out=tmp_path / f"{workers}", workers=workers)
    expected = outcome(tmp_path / "0")
    assert any("-" in name for name in expected["state"]), "clients have states"
    assert outcome(tmp_path / "1") == expected == outcome(tmp_path / "2")


def test_a_killed_run_goes_on_with_the_moments_of_its_clients(tmp_path: Path) -> None:
    run_with_snapshots(RUN, tmp_path / "whole", {1, 3, 5})
    expected = outcome(tmp_path / "whole")
    for killed in (1, 3, 5):
        resume(tmp_path / f"after-{killed}")
        assert outcome(tmp_path / f"after-{killed}") == expected
    with pytest.raises(CannotResume, match=r"local\.optimizer\.beta1 0\.9 \(now 0\.8\)"):
        resume(tmp_path / "whole", ["rounds=9", "local.optimizer.beta1=0.8"])


def test_moments_stay_at_real_sites(site_arrays: Path) -> None:
    """The sites end with the moments of the simulation, and nothing but theta travels."""
    local = {"epochs": 2, "batch_size": 8, "lr": 0.01, "optimizer": {"name": "adam", "moments": "client"}}
    settings = config_of(site_arrays, local=local, federation={"sites": list(CLIENTS), "patience": 5})
    sites = sites_of(site_arrays, settings)
    result = serve(settings, Direct(sites), site_arrays / "run")
    simulated = run(settings).state
    assert torch.equal(result.state.theta, simulated.theta)
    terms, by_name = recorded_terms(site_arrays / "run"), {site.name: site for site in sites}
    for number, own in simulated.clients.items():
        kept = by_name[terms.names[number]].states(terms.run)[simulated.clients.counted(number)]
        assert own.keys() == kept.keys() == {"adam_m", "adam_v", "adam_steps"}
        assert all(torch.equal(own[name], kept[name]) for name in own)
    size = simulated.theta.numel() * simulated.theta.element_size()
    assert {r["bytes_up"] for r in result.history} == {3 * size}


# --- configs ---------------------------------------------------------------------------------------------------------


def test_it_is_a_setting_like_others() -> None:
    config = load_config({**CONFIG, "local": {"steps": 1, "lr": 0.01, "optimizer": "adam"}})
    assert config.local.optimizer == Adam() and prepare(config).config.tree()["local"]["optimizer"]["name"] == "adam"
    assert "optimizer: {name: sgd}" in load_config(CONFIG).yaml()
    for wrong, words in [
        ({"optimizer": "adm"}, r"local\.optimizer\.name 'adm' is unknown; did you mean 'adam'"),
        ({"optimizer": {"name": "adam", "beta": 1}}, r"local\.optimizer: key 'beta' is unknown"),
        ({"optimizer": {"name": "adam", "eps": -1.0}}, r"local\.optimizer\.eps must be positive"),
        ({"optimizer": "adamw", "momentum": 0.9}, r"local\.momentum is 0\.9, but AdamW has moments"),
    ]:
        with pytest.raises(FedadcError, match=words):
            load_config({**CONFIG, "local": {"steps": 1, **wrong}})
