"""Presets: the paper's settings, laid over a config and under its overrides."""

from __future__ import annotations

from typing import Any

import pytest

from fedadc.config import load_config
from fedadc.errors import FedadcError
from fedadc.methods import FedADC, FedAvg
from fedadc.objectives import ModelContrast
from fedadc.presets import PRESETS
from fedadc.runner import run

BASE: dict[str, Any] = {
    "rounds": 1,
    "data": {"name": "digits", "clients": 20, "partition": {"name": "sort", "labels_per_client": 2}},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "fedadc", "beta": 0.5},
    "objective": {"name": "self_confidence", "lam": 0.9},
    "local": {"steps": 2, "batch_size": 8, "lr": 0.3, "weight_decay": 4e-4, "momentum": 0.2},
    "cohort": {"size": 3},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains(preset: str) -> None:
    result = run(BASE, preset=preset)
    assert result.history[-1]["train_loss"] > 0
    tree = result.config.tree()
    for node, settings in PRESETS[preset].tree.items():
        for key, value in settings.items():
            assert tree[node][key] == value, f"{node}.{key}"


def test_a_preset_replaces_what_has_a_name_and_keeps_the_rest() -> None:
    config = load_config(BASE, presets=["moon"])
    assert config.method == FedAvg() and config.objective == ModelContrast(mu=5.0)
    assert config.model.name == "mlp" and config.model.options == {"hidden": [8], "projection": 256}
    assert (config.local.lr, config.local.weight_decay, config.local.momentum) == (0.01, 1e-5, 0.9)
    assert (config.local.steps, config.local.batch_size) == (2, 8)
    assert load_config(BASE, presets=["fedadc"]).local.weight_decay == 4e-4  # the paper gives this one none of its own


def test_overrides_come_after_presets_and_later_presets_after_earlier() -> None:
    config = load_config(BASE, ["local.lr=0.07", "method.beta=0.6"], presets=["moon", "fedadc"])
    assert config.local.lr == 0.07
    assert isinstance(config.method, FedADC) and config.method.beta == 0.6 and config.method.nesterov


def test_the_papers_own_figures() -> None:
    """Section IV-A, method by method."""
    for name, local, settings in (
        ("fedrs", {"momentum": 0.9}, {"alpha": 0.5}),
        ("moon", {"lr": 0.01, "weight_decay": 1e-5}, {"tau": 0.5}),
        ("fedgkd", {"momentum": 0.9}, {"tau": 0.5, "lam": 0.1}),
        ("fedntd", {"momentum": 0.9}, {"tau": 1.0, "beta": 0.3}),
        ("fedprox", {"momentum": 0.0}, {}),
        ("feddyn", {"weight_decay": 1e-3}, {}),
        ("fedadc+", {}, {"lam": 0.35}),
    ):
        tree = PRESETS[name].tree
        assert local.items() <= tree["local"].items() and settings.items() <= tree["objective"].items(), name


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(FedadcError, match=r"preset 'fedadk' is unknown; did you mean 'fedadc'\?"):
        load_config(BASE, presets=["fedadk"])
