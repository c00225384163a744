"""The server's half and the sites' halves, joined by a transport without a network: the bits are the simulation's."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from direct_sites import CLIENTS, Direct, config_of, served_by_mortals, sites_of
from fedadc.config.build import prepare
from fedadc.errors import FedadcError
from fedadc.methods import METHODS
from fedadc.runs.record import load_config
from fedadc.runs.runner import run
from fedadc.sites.connections import SiteConnections
from fedadc.sites.joining import join
from fedadc.sites.packets import Kind, Lost, NotSent, Packet
from fedadc.sites.server import SiteFederation
from fedadc.sites.serving import serve
from fedadc.sites.site import Site


def federation_of(folder: Path, config: Any, losing: Collection[int] = ()) -> tuple[SiteFederation, list[Site]]:
    sites = sites_of(folder, config)
    connections = SiteConnections(Direct(sites, losing), patience=5)
    return SiteFederation(config, connections, join(connections, CLIENTS, config, "r1", True, print)), sites


CASES: dict[str, dict[str, Any]] = {name: {"method": name} for name in METHODS}
CASES |= {
    "top_k": {"method": "scaffold", "communication": {"uplink": "top_k"}},
    "eight_bit": {"method": "fedadc", "communication": {"uplink": "eight_bit"}},
    "clusters": {"method": "fedadc", "cohort": {"size": 3, "selection": {"name": "clusters", "count": 2}}},
    "weighted": {"method": "scaffold", "cohort": {"size": 3, "weighting": "samples"}},
}


@pytest.mark.parametrize("losing", [(), (11, 13, 16)], ids=["", "sites lost"])
@pytest.mark.parametrize("case", CASES)
def test_sites_give_the_bits_of_the_simulation(case: str, losing: Collection[int], site_arrays: Path) -> None:
    config = config_of(site_arrays, **CASES[case])
    here = list(prepare(config).federation.rounds(config.rounds))[-1]
    federation, sites = federation_of(site_arrays, config, losing)
    results = list(federation.rounds(config.rounds))
    there = results[-1]
    if losing and federation.method.federated:
        assert any("was lost" in event for result in results for event in result.events)
    assert torch.equal(here.state.theta, there.state.theta)
    assert here.state.server.keys() == there.state.server.keys()
    assert all(torch.equal(here.state.server[n], there.state.server[n]) for n in here.state.server)
    assert here.train_loss == there.train_loss and here.cohort == there.cohort and here.bytes_up == there.bytes_up
    for name in ("test_accuracy", "personal_accuracy"):
        if name in here.metrics and not (name == "test_accuracy" and not federation.method.federated):
            assert here.metrics[name] == there.metrics[name]
    by_name = {site.name: site for site in sites}
    for number, state in here.state.clients.items():
        kept = by_name[CLIENTS[number]].states("r1")[there.state.clients.counted(number)]
        assert state.keys() == kept.keys() and all(torch.equal(state[n], kept[n]) for n in state)


@pytest.mark.parametrize("method", ["fedadc", "scaffold", "moon"])
def test_a_server_that_dies_at_any_message_goes_on_with_the_same_bits(method: str, site_arrays: Path) -> None:
    settings = {"sites": list(CLIENTS), "patience": 5}
    config = config_of(site_arrays, method=method, rounds=5, checkpoint={"every": 2}, federation=settings)
    plain = load_config({**config.tree(), "data": {"name": "npz", "path": str(site_arrays / "all.npz"), "test": 0.2}})
    run(plain, out=site_arrays / "here")
    limits = (7, 12, 14, 17, 20, 26, 1000)
    assert served_by_mortals(config, sites_of(site_arrays, config), site_arrays / "there", limits) >= 3
    assert (site_arrays / "there/model.safetensors").read_bytes() == (
        site_arrays / "here/model.safetensors"
    ).read_bytes()
    assert len((site_arrays / "there/metrics.jsonl").read_text().splitlines()) == 5


def test_a_site_that_has_lost_its_folder_joins_again(site_arrays: Path) -> None:
    config = config_of(site_arrays, method="fedadc")
    here = list(prepare(config).federation.rounds(config.rounds))[-1]
    federation, _ = federation_of(site_arrays, config)
    thetas = []
    for result in federation.rounds(config.rounds):
        thetas.append(result.state.theta)
        shutil.rmtree(site_arrays / "kept")
    assert torch.equal(here.state.theta, thetas[-1])


def test_a_site_whose_data_changes_is_refused_by_name(site_arrays: Path) -> None:
    config = config_of(site_arrays, method="fedadc", cohort={})
    federation, _ = federation_of(site_arrays, config)
    rounds = federation.rounds(config.rounds)
    next(rounds)
    np.savez(site_arrays / "carl.npz", x=np.ones((20, 6)), y=np.arange(20) % 4)
    with pytest.raises(FedadcError, match=r"the data of site carl has changed since the run began"):
        next(rounds)


def test_the_server_sends_initial_weights_that_the_sites_do_not_have(site_arrays: Path) -> None:
    run(config_of(site_arrays, rounds=1), out=site_arrays / "before")
    config = config_of(site_arrays, method="fedper", model={"name": "mlp", "hidden": [8], "projection": 6,
                       "weights": str(site_arrays / "before/model.safetensors")})  # fmt: skip
    here = list(prepare(config).federation.rounds(config.rounds))[-1]
    federation, _ = federation_of(site_arrays, config)
    shutil.move(site_arrays / "before", site_arrays / "gone")  # from here on, only the sites have them
    there = list(federation.rounds(config.rounds))[-1]
    assert torch.equal(here.state.theta, there.state.theta)
    assert here.metrics["personal_accuracy"] == there.metrics["personal_accuracy"]


def test_models_that_only_their_sites_have_are_evaluated_there(site_arrays: Path) -> None:
    config = config_of(site_arrays, method="local_only")
    simulation = prepare(config).federation
    here = list(simulation.rounds(config.rounds))[-1]
    evaluator = replace(simulation.evaluator, shares={"test": simulation.local_tests})
    there = list(federation_of(site_arrays, config)[0].rounds(config.rounds))[-1]
    assert there.metrics["personal_accuracy"] == evaluator.of_clients(here.state)["personal_accuracy"] > 0
    wrong = config_of(site_arrays, method="local_only", federation={"sites": list(CLIENTS), "evaluate": "server"})
    with pytest.raises(FedadcError, match="the method has no model at the server; set it to sites"):
        serve(wrong, Direct(sites_of(site_arrays, wrong)), site_arrays / "run", site_arrays / "all.npz")


class Busy(Direct):
    """Every third message cannot be sent at first."""

    tried = 0

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        self.tried += 1
        if self.tried % 3 == 0:
            raise NotSent("the database is locked")
        return super().send(node, kind, packet)


def test_messages_that_cannot_be_sent_at_once(site_arrays: Path) -> None:
    config = config_of(site_arrays, method="scaffold")
    here = list(prepare(config).federation.rounds(config.rounds))[-1]
    connections = SiteConnections(Busy(sites_of(site_arrays, config)), patience=5)
    federation = SiteFederation(config, connections, join(connections, CLIENTS, config, "r1", True, print))
    results = list(federation.rounds(config.rounds))
    assert any("(the database is locked); it is sent again" in event for result in results for event in result.events)
    assert torch.equal(here.state.theta, results[-1].state.theta)


class Counting(Direct):
    """Knows how many requests are open."""

    most = 0

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        number = super().send(node, kind, packet)
        self.most = max(self.most, len(self.answers))
        return number


@pytest.mark.parametrize("at_once", [1, 2, None])
def test_so_many_sites_work_at_the_same_time(at_once: int | None, site_arrays: Path) -> None:
    config = config_of(site_arrays, method="scaffold", cohort={})
    here = list(prepare(config).federation.rounds(config.rounds))[-1]
    transport = Counting(sites_of(site_arrays, config))
    connections = SiteConnections(transport, patience=5, at_once=at_once)
    federation = SiteFederation(config, connections, join(connections, CLIENTS, config, "r1", True, print))
    assert torch.equal(here.state.theta, list(federation.rounds(config.rounds))[-1].state.theta)
    assert transport.most == (at_once or len(CLIENTS))


class Restarting(Direct):
    """A site has started again, but its old node is still listed, and nothing comes from it."""

    def restart(self, name: str) -> None:
        (self.old,) = [node for node, site in self.sites.items() if site.name == name]
        self.sites[self.old + 1000] = self.sites[self.old]

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        number = super().send(node, kind, packet)
        if node == getattr(self, "old", None):
            self.answers[number] = Lost("the node is gone")
        return number


def test_a_site_that_starts_again_before_its_old_node_is_gone(site_arrays: Path) -> None:
    config = config_of(site_arrays, method="scaffold", cohort={})
    here = list(prepare(config).federation.rounds(config.rounds))[-1]
    transport = Restarting(sites_of(site_arrays, config))
    connections = SiteConnections(transport, patience=5)
    federation = SiteFederation(config, connections, join(connections, CLIENTS, config, "r1", True, print))
    rounds = federation.rounds(config.rounds)
    results = [next(rounds)]
    transport.restart("carl")
    results += rounds
    assert any("site carl has started again" in event for result in results for event in result.events)
    assert torch.equal(here.state.theta, results[-1].state.theta)


def test_fairness_over_sites_is_that_of_the_simulation(site_arrays: Path) -> None:
    config = config_of(site_arrays, method="ditto", evaluate={"metrics": ["fairness"], "batch_size": 5})
    here = list(prepare(config).federation.rounds(config.rounds))[-1].metrics
    there = list(federation_of(site_arrays, config)[0].rounds(config.rounds))[-1].metrics
    found = {name: value for name, value in there.items() if "_accuracy_" in name}
    assert len(found) == 8 and found == {name: here[name] for name in found}
    served = config_of(site_arrays, evaluate=config.tree()["evaluate"],
                       federation={"sites": list(CLIENTS), "evaluate": "server"})  # fmt: skip
    np.savez(site_arrays / "held.npz", x_test=np.ones((8, 6)), y_test=np.arange(8) % 4)
    with pytest.raises(FedadcError, match="fairness needs sites that hold out rows"):
        serve(served, Direct(sites_of(site_arrays, served)), site_arrays / "run", site_arrays / "held.npz")
