"""What can be named in a config, with settings and defaults."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml

from fedadc.communication.clock import DISTRIBUTIONS
from fedadc.communication.downlinks import DOWNLINKS
from fedadc.communication.uplinks import UPLINKS
from fedadc.config.presets import PRESETS
from fedadc.data import DATASETS
from fedadc.errors import unknown
from fedadc.methods import METHODS, PAIRS, Method
from fedadc.models import MODELS
from fedadc.objectives import OBJECTIVES, CrossEntropy
from fedadc.partitions import PARTITIONS
from fedadc.schedules import SCHEDULES
from fedadc.selections import SELECTIONS


@dataclass(frozen=True)
class CatalogEntry:
    name: str
    summary: str
    settings: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)  # what else one should know


def entries(what: str) -> list[CatalogEntry]:
    """The rows of one table."""
    if what == "datasets":
        return [_of_function(name, loader) for name, loader in DATASETS.items()]
    if what == "models":
        return [_of_function(name, cls) for name, cls in MODELS.items()]
    if what == "presets":
        return [
            CatalogEntry(name, p.summary, {key: _flow(value) for key, value in p.tree.items()})
            for name, p in PRESETS.items()
        ]
    if what == "methods":
        plain = [_of_method(name, METHODS[name]()) for name in METHODS]
        return plain + [_of_method(short, METHODS[m](objective=OBJECTIVES[o]())) for short, (m, o) in PAIRS.items()]
    tables: dict[str, dict[str, Any]] = {
        "objectives": OBJECTIVES, "partitions": PARTITIONS, "schedules": SCHEDULES, "selections": SELECTIONS,
        "downlinks": DOWNLINKS, "uplinks": UPLINKS, "distributions": DISTRIBUTIONS,
    }  # fmt: skip
    if what not in tables:
        raise unknown("table", what, [*tables, "datasets", "models", "methods", "presets"])
    return [CatalogEntry(name, _summary(cls), _settings(cls)) for name, cls in tables[what].items()]


def _of_method(name: str, method: Method) -> CatalogEntry:
    """A method, and what it costs beyond FedAvg at its default settings; for a pair also its objective's."""
    objective = method.objective
    owners: list[Any] = [method] if isinstance(objective, CrossEntropy) else [objective, method]
    summary, settings = _summary(type(method)), _settings(type(method))
    if len(owners) > 1:
        summary = f"{type(method).__name__} with {type(objective).__name__}: {_summary(type(objective))}"
        settings |= {f"objective.{key}": value for key, value in _settings(type(objective)).items()}
    one = torch.zeros(1)
    kept = {**method.client_state(one), **objective.client_state(one)}
    times = (1 + len(method.tracked), 1 + len({*method.downlink, *objective.downlink})) if method.federated else (0, 0)
    part = " body" if method.travels == "embed" else ""
    facts = {
        "paper": next((o.paper for o in owners if o.paper), ""),
        "up": f"×{times[0]}{part}",
        "down": f"×{times[1]}{part}",
        "client keeps": ", ".join(kept) or "–",
        "extra computation": ", ".join(o.computation for o in owners if o.computation) or "–",
    }
    return CatalogEntry(name, summary, settings, facts)


def _settings(cls: Any) -> dict[str, str]:
    fields = [f for f in dataclasses.fields(cls) if f.metadata.get("config", True)]
    return {f.name: f.metadata.get("default", _show(f.default)) for f in fields}


def _flow(tree: Any) -> str:
    """As it could stand in a config."""
    return yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, width=1000).strip()


def _of_function(name: str, function: Any) -> CatalogEntry:
    given = ("input_shape", "classes", "data_dir")
    parameters = {n: p for n, p in inspect.signature(function).parameters.items() if n not in given}
    return CatalogEntry(name, _summary(function), {n: _show(p.default) for n, p in parameters.items()})


def _summary(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n", 1)[0].rstrip(".")


def _show(default: Any) -> str:
    if default in (dataclasses.MISSING, inspect.Parameter.empty):
        return "required"
    if default is None:
        return "–"
    if isinstance(default, bool):
        return str(default).lower()
    return str(list(default)) if isinstance(default, tuple) else str(default)
