"""The scales at which a design can run: as published, smaller for a laptop, or on the embedded digits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedadc.config.yaml import overlay, with_values
from fedadc.studies.paper.design import Design, Panel, Row


@dataclass(frozen=True)
class Scale:
    """Changes to the published settings."""

    name: str
    summary: str
    seeds: int | None = None  # None: as many as in the paper
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # data set of the paper -> key.sub -> value
    clients: Mapping[int, int] = field(default_factory=dict)  # published number -> number here
    grids: str = ""  # the scale whose grids are searched; "": none
    validation: float = 0.05  # the share of training data on which settings are chosen

    def tree(self, panel: Panel, row: Row) -> dict[str, Any]:
        """The config of a row, without seed; settings that a grid decides have the value of the design."""
        clients = panel.base["data"]["clients"]
        changes = {**self.changes.get(panel.base["data"]["name"], {}), **panel.changes.get(self.name, {})}
        tree = with_values(panel.base, {"data.clients": self.clients.get(clients, clients), **changes})
        tree = with_values(overlay(tree, row.changes), row.settings.get(self.name, {}))
        return {**tree, "label": row.label}

    def seeds_of(self, design: Design) -> int:
        return self.seeds or design.seeds


AS_PUBLISHED = Scale(
    "paper", "as published: rounds, width, number of trials, and the grids that the paper searched", grids="paper"
)
ON_LAPTOP = Scale(
    "laptop",
    "fewer rounds and narrower networks on the paper's data; hours",
    seeds=5,
    changes={
        "cifar10": {"rounds": 100, "model.width": 0.25, "evaluate.every": 5},
        "cifar100": {"rounds": 30, "model.width": 16, "model.groups": 8, "evaluate.every": 5},
    },
)
_SMALL_IMAGES = {
    "rounds": 60,
    "data.name": "digits",
    "data.augment": {},
    "model": {"name": "mlp", "hidden": [64, 64]},
    "evaluate.every": 1,
}
ON_DIGITS = Scale(
    "digits",
    "the same design on small images that come with the package; a minute or two, no download",
    seeds=5,
    changes={
        "cifar10": {**_SMALL_IMAGES, "local.batch_size": 16},
        "cifar100": {**_SMALL_IMAGES, "local.batch_size": 10},
    },
    clients={100: 50, 500: 100, 1000: 150},  # of 1,437 training samples
    grids="digits",
    validation=0.15,
)
SCALES = {scale.name: scale for scale in (AS_PUBLISHED, ON_LAPTOP, ON_DIGITS)}
