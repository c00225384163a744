"""The scales at which a design can run: as published, smaller for a laptop, or on the embedded digits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedadc.config.yaml import overlay, with_value
from fedadc.studies.paper.design import Design, Panel, Row

CLIENTS_ON_DIGITS = {100: 50, 500: 100, 1000: 150}  # digits has 1,437 training samples


@dataclass(frozen=True)
class Scale:
    """Changes to the published settings."""

    name: str
    summary: str
    seeds: int | None = None  # None: as many as in the paper
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by the data set of the paper
    clients: Mapping[int, int] = field(default_factory=dict)  # published number -> number here
    grids: str = ""  # the scale whose grids are searched; "": none
    validation: float = 0.05  # the share of training data on which settings are chosen

    def tree(self, panel: Panel, row: Row) -> dict[str, Any]:
        """The config of a row, without seed; settings that a grid decides have the value of the design."""
        base = overlay(panel.base, self.changes.get(panel.base["data"]["name"], {}))
        clients = panel.base["data"]["clients"]
        base = overlay(base, {"data": {"clients": self.clients.get(clients, clients)}})
        tree = overlay(overlay(base, panel.changes.get(self.name, {})), row.changes)
        for key, value in row.settings.get(self.name, {}).items():
            tree = with_value(tree, key, value)
        return {**tree, "label": row.label}

    def seeds_of(self, design: Design) -> int:
        return self.seeds or design.seeds


PAPER = Scale(
    "paper", "as published: rounds, width, number of trials, and the grids that the paper searched", grids="paper"
)
_DIGITS = {
    "rounds": 60,
    "data": {"name": "digits", "augment": {"crop": 0, "flip": False}},
    "model": {"name": "mlp", "hidden": [64, 64]},
    "evaluate": {"every": 1},
}
SCALES = {
    "paper": PAPER,
    "laptop": Scale(
        "laptop",
        "fewer rounds and narrower networks on the paper's data; hours",
        seeds=3,
        changes={
            "cifar10": {"rounds": 100, "model": {"width": 0.25}, "evaluate": {"every": 5}},
            "cifar100": {"rounds": 30, "model": {"width": 16, "groups": 8}, "evaluate": {"every": 5}},
        },
    ),
    "digits": Scale(
        "digits",
        "the same design on small images that come with the package; a minute or two, no download",
        seeds=3,
        changes={
            "cifar10": overlay(_DIGITS, {"local": {"batch_size": 16}}),
            "cifar100": overlay(_DIGITS, {"local": {"batch_size": 10}}),
        },
        clients=CLIENTS_ON_DIGITS,
        grids="digits",
        validation=0.15,
    ),
}
