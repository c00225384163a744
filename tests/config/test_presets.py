"""Presets: the paper's settings, merged over a config; overrides are applied after them."""

from __future__ import annotations

from typing import Any

import pytest

from fedadc.config.presets import PRESETS
from fedadc.errors import FedadcError
from fedadc.methods import FedADC, FedAvg
from fedadc.objectives import ModelContrast
from fedadc.runs.record import load_config
from fedadc.runs.runner import run

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


def test_a_preset_replaces_nodes_with_a_name_and_merges_the_others() -> None:
    config = load_config(BASE, presets=["moon"])
    assert config.method == FedAvg() and config.objective == ModelContrast(mu=5.0)
    assert config.model.name == "mlp" and config.model.options == {"hidden": [8], "projection": 256}
    assert (config.local.lr, config.local.weight_decay, config.local.momentum) == (0.01, 1e-5, 0.9)
    assert (config.local.steps, config.local.batch_size) == (2, 8)
    assert load_config(BASE, presets=["fedadc"]).local.weight_decay == 4e-4  # the paper gives no weight decay for it


def test_overrides_come_after_presets_and_later_presets_after_earlier() -> None:
    config = load_config(BASE, ["local.lr=0.07", "method.beta=0.6"], presets=["moon", "fedadc"])
    assert config.local.lr == 0.07
    assert isinstance(config.method, FedADC) and config.method.beta == 0.6 and config.method.nesterov


MOMENTUM = {"method.beta": {0.6, 0.7, 0.8, 0.9}, "method.server_lr": {1.0}}
LR = {0.1, 0.05, 0.03}
PAPER: dict[str, dict[str, set[Any]]] = {  # sections IV-A and IV-B: the allowed values
    "fedavg": {"local.momentum": {0.0}},
    "fedavg-momentum": {"local.momentum": {0.9}},
    "slowmo": MOMENTUM,
    "fedadc": MOMENTUM,
    "fedadc+": {**MOMENTUM, "objective.lam": {0.35}},
    "fedprox": {"method.mu": {0.1, 0.01, 0.001}, "local.momentum": {0.0}},
    "feddyn": {"method.alpha": {0.1, 0.01, 0.001}, "local.weight_decay": {1e-3}},
    "moon": {"objective.tau": {0.5}, "objective.mu": {1.0, 5.0}, "local.lr": {0.01}, "local.weight_decay": {1e-5},
             "model.projection": {256}},
    "fedgkd": {"objective.tau": {0.5}, "objective.lam": {0.1}, "local.momentum": {0.9}},
    "fedntd": {"objective.tau": {1.0}, "objective.beta": {0.3}, "local.momentum": {0.9}},
    "fedrs": {"objective.alpha": {0.5}, "local.momentum": {0.9}},
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_values_from_the_paper(name: str) -> None:
    for key, allowed in {"local.lr": LR, **PAPER[name]}.items():
        node, setting = key.split(".")
        assert PRESETS[name].tree[node][setting] in allowed, key


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(FedadcError, match=r"preset 'fedadk' is unknown; did you mean 'fedadc'\?"):
        load_config(BASE, presets=["fedadk"])
