"""Federations of real processes, with a SuperLink and SuperNodes of Flower: the bits are the simulation's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from family import OBJECTIVES_OF_CLASSES, linux
from fedadc.config.settings import Config
from fedadc.methods import METHODS
from fedadc.runs.record import load_config
from fedadc.sites.trial import prepared, train_on_this_machine
from federations import CONFIG, config_of, parts_of, require_same_bits, simulated, trained

pytestmark = [linux, pytest.mark.usefixtures("nothing_is_left")]
# two runs for the suite, as short as possible: with this seed, client 1 trains in both rounds of the first
SUITE: dict[str, dict[str, Any]] = {
    "scaffold, compressed": {"method": "scaffold", "communication": {"uplink": "top_k"}, "rounds": 2},
    "fedadc+": {"method": "fedadc+", "rounds": 1},
}
PARTIAL = {"seed": 4, "cohort": {"size": 1}}
ALL: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in METHODS},
    **{f"fedadc with {name}": {"method": "fedadc", "objective": name} for name in OBJECTIVES_OF_CLASSES},
    "eight bit": {"method": "fedadc", "communication": {"uplink": "eight_bit"}},
    "partial cohorts": {"method": "moon", "rounds": 4, "cohort": {"size": 1}},
    "weighted": {"method": "scaffold", "cohort": {"weighting": "samples"}},
    "images": {"method": "fedadc", "model": {"name": "cnn", "channels": [4, 8], "hidden": [16]}},
}


MINE = """
import fedadc
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class SignAvg(fedadc.methods.FedAvg):
    scale: float = 1.0
    def step(self, theta, grad, local):
        return theta - self.scale * local.lr * grad(theta).sign()
"""


def check(config: Config, folder: Path) -> None:
    here = simulated(config, folder / "here")
    trained(config, folder / "there")
    require_same_bits(here, folder / "here", folder / "there")


def test_two_methods_at_once(tmp_path: Path) -> None:
    """Two runs share the SuperLink and the sites."""
    first, second = (config_of(**changes, **PARTIAL) for changes in SUITE.values())
    here = simulated(first, tmp_path / "first here"), simulated(second, tmp_path / "second here")
    assert here[0].state.clients.counted(1) == 2
    other = prepared(tmp_path / "second", second, second.data.clients)[0]
    with parts_of(first, tmp_path / "first") as parts:
        other.start_run(parts.address).wait(timeout=400)
        parts.finished()
        kept = parts.federation.folder / "sites"
    require_same_bits(here[0], tmp_path / "first here", tmp_path / "first")
    require_same_bits(here[1], tmp_path / "second here", tmp_path / "second", kept)


@pytest.mark.federation
@pytest.mark.parametrize("case", ALL)
def test_every_method_and_objective(case: str, tmp_path: Path) -> None:
    check(config_of(**ALL[case]), tmp_path)


@pytest.mark.federation
def test_a_method_of_the_user(tmp_path: Path) -> None:
    """Its file is part of the app, and Flower takes it to the sites."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**CONFIG, "method": {"name": "mine:SignAvg", "scale": 0.5}}))
    check(load_config(tmp_path / "c.yaml"), tmp_path)


@pytest.mark.federation
def test_twenty_sites(tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 20, "partition": {"name": "dirichlet", "alpha": 1.0}}
    check(config_of(method="scaffold", rounds=2, data=data, cohort={"size": 5}), tmp_path)


@pytest.mark.federation
@pytest.mark.parametrize("downlink", ["broadcast", "overlap"])
def test_sites_that_repeat_the_update_of_the_server_behind_tls(downlink: str, tmp_path: Path) -> None:
    changes = {"method": "fedadc", "rounds": 4, "cohort": {"size": 1}, "communication": {"downlink": downlink}}
    config = config_of(**changes)
    here = simulated(config, tmp_path / "here")
    train_on_this_machine(tmp_path / "there", config, sites=config.data.clients, tls=True)
    require_same_bits(here, tmp_path / "here", tmp_path / "there")
    assert "https://" in (tmp_path / "there/local/logs/superlink.log").read_text()
