"""Federations of real processes, with a SuperLink and SuperNodes of Flower: the bits are the simulation's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from family import linux
from fedadc.methods import METHODS
from fedadc.objectives import OBJECTIVES
from federations import at_once, config_of, left_over, require_same_bits, simulated, trained

pytestmark = linux
SUITE: dict[str, dict[str, Any]] = {
    "scaffold, compressed": {"method": "scaffold", "communication": {"uplink": "top_k"}},
    "fedadc+": {"method": "fedadc+"},
}
ALL: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in METHODS},
    **{f"fedadc with {name}": {"method": "fedadc", "objective": name} for name in OBJECTIVES},
    "eight bit": {"method": "fedadc", "communication": {"uplink": "eight_bit"}},
    "partial cohorts": {"method": "moon", "rounds": 4, "cohort": {"size": 1}},
    "weighted": {"method": "scaffold", "cohort": {"weighting": "samples"}},
    "images": {"method": "fedadc", "model": {"name": "cnn", "channels": [4, 8], "hidden": [16]}},
}


def check(cases: dict[str, dict[str, Any]], folder: Path) -> None:
    configs = {name: config_of(**changes) for name, changes in cases.items()}
    here = {name: simulated(config, folder / f"{name} here") for name, config in configs.items()}
    at_once([lambda c=config, n=name: trained(c, folder / n) for name, config in configs.items()])
    for name in configs:
        require_same_bits(here[name], folder / f"{name} here", folder / name)
    assert not left_over()


def test_two_methods(tmp_path: Path) -> None:
    check(SUITE, tmp_path)


@pytest.mark.federation
@pytest.mark.parametrize("case", ALL)
def test_every_method_and_objective(case: str, tmp_path: Path) -> None:
    check({case: ALL[case]}, tmp_path)


@pytest.mark.federation
def test_twenty_sites(tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 20, "partition": {"name": "dirichlet", "alpha": 1.0}}
    check({"twenty": {"method": "scaffold", "rounds": 2, "data": data, "cohort": {"size": 5}}}, tmp_path)
