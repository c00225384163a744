"""Presets: the FedADC paper's settings for each method (section IV-A), merged over a config.

Where the paper searched a grid and does not say which value it chose, the summary names the grid and the preset uses
one of its values. A preset sets the weight decay only where the paper gives a value for that method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedadc.config.yaml import overlay
from fedadc.errors import spelled, unknown


@dataclass(frozen=True)
class Preset:
    summary: str
    tree: Mapping[str, Any]


def _preset(
    summary: str,
    method: dict[str, Any],
    objective: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    lr: float = 0.05,  # from the paper's grid {.1, .05, .03}
    **local: float,
) -> Preset:
    tree = {
        "method": method,
        "objective": objective or {"name": "cross_entropy"},
        "local": {"lr": lr, "momentum": 0.0, **local},
    }
    return Preset(summary, tree | ({"model": model} if model else {}))


PRESETS: dict[str, Preset] = {
    "fedavg": _preset(
        "no local momentum; lr from {.1, .05, .03}, also in every preset that names no lr", {"name": "fedavg"}
    ),
    "fedavg-momentum": _preset(
        "local momentum .9, which FedAvg in Table I probably used", {"name": "fedavg"}, momentum=0.9
    ),
    "slowmo": _preset("alpha 1; beta from {.6, .7, .8, .9}", {"name": "slowmo", "beta": 0.9, "server_lr": 1.0}),
    "fedadc": _preset(
        "alpha 1; beta from {.6, .7, .8, .9}; Nesterov (Table I does not say which form)",
        {"name": "fedadc", "beta": 0.9, "nesterov": True, "server_lr": 1.0},
    ),
    "fedadc+": _preset(
        "FedADC with lambda .35",
        {"name": "fedadc", "beta": 0.9, "nesterov": True, "server_lr": 1.0},
        {"name": "self_confidence", "lam": 0.35, "tau": 1.0},
    ),
    "fedprox": _preset("mu from {.1, .01, .001}; local momentum 0", {"name": "fedprox", "mu": 0.01}),
    "feddyn": _preset(
        "alpha from {.1, .01, .001}; weight decay 1e-3", {"name": "feddyn", "alpha": 0.1}, weight_decay=1e-3
    ),
    "moon": _preset(
        "T .5, lr .01, weight decay 1e-5; mu from {1, 5}; projection head to 256; local momentum .9 (authors' code)",
        {"name": "fedavg"},
        {"name": "model_contrast", "mu": 5.0, "tau": 0.5},
        {"projection": 256},
        lr=0.01,
        weight_decay=1e-5,
        momentum=0.9,
    ),
    "fedgkd": _preset(
        "T .5, lambda .1; local momentum .9; the received model as teacher",
        {"name": "fedavg"},
        {"name": "global_distillation", "lam": 0.1, "tau": 0.5, "window": 1},
        momentum=0.9,
    ),
    "fedntd": _preset(
        "tau 1, beta .3; local momentum .9",
        {"name": "fedavg"},
        {"name": "not_true_distillation", "beta": 0.3, "tau": 1.0},
        momentum=0.9,
    ),
    "fedrs": _preset(
        "alpha .5; local momentum .9", {"name": "fedavg"}, {"name": "restricted_softmax", "alpha": 0.5}, momentum=0.9
    ),
}


def apply_preset(tree: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """The config tree with the settings of a preset merged over it."""
    preset = spelled(preset, PRESETS)
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    return overlay(tree, PRESETS[preset].tree)
