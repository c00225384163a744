"""The tables of `fedadc list`: everything a config can name, with its settings and defaults."""

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
from fedadc.optimizers import OPTIMIZERS
from fedadc.partitions import PARTITIONS
from fedadc.schedules import SCHEDULES
from fedadc.selections import SELECTIONS
from fedadc.system.plugins import KINDS, package_of, plugins


@dataclass(frozen=True)
class CatalogEntry:
    name: str
    summary: str
    settings: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)  # methods only: paper, communication, client state, computation


def catalog(what: str) -> list[CatalogEntry]:
    """What a config can name, e.g. catalog("methods"): the built-in entries, then plugins, which are not imported."""
    built_in = _built_in(what)
    return built_in + _plugin_entries(what, {entry.name for entry in built_in})


def _plugin_entries(what: str, built_in: set[str]) -> list[CatalogEntry]:
    found = []
    for name, declared in sorted(plugins(what).items()) if what in KINDS.values() else ():
        packages = " and ".join(sorted(map(package_of, declared)))
        problem = "; the built-in one of this name is used" if name in built_in else ""
        problem = problem or ("; uninstall all but one" if len(declared) > 1 else "")
        found.append(CatalogEntry(name, f"plugin of {packages}{problem}"))
    return found


def _built_in(what: str) -> list[CatalogEntry]:
    if what == "datasets":
        return [_function_entry(name, loader) for name, loader in DATASETS.items()]
    if what == "models":
        return [_function_entry(name, cls) for name, cls in MODELS.items()]
    if what == "presets":
        return [
            CatalogEntry(name, p.summary, {key: _inline_yaml(value) for key, value in p.tree.items()})
            for name, p in PRESETS.items()
        ]
    if what == "methods":
        single = [_method_entry(name, METHODS[name]()) for name in METHODS]
        return single + [_method_entry(pair, METHODS[m](objective=OBJECTIVES[o]())) for pair, (m, o) in PAIRS.items()]
    tables: dict[str, dict[str, Any]] = {
        "objectives": OBJECTIVES, "partitions": PARTITIONS, "schedules": SCHEDULES, "selections": SELECTIONS,
        "downlinks": DOWNLINKS, "uplinks": UPLINKS, "distributions": DISTRIBUTIONS, "optimizers": OPTIMIZERS,
    }  # fmt: skip
    if what not in tables:
        raise unknown("table", what, [*tables, "datasets", "models", "methods", "presets"])
    return [CatalogEntry(name, _summary(cls), _settings(cls)) for name, cls in tables[what].items()]


def _method_entry(name: str, method: Method) -> CatalogEntry:
    """The entry of a method at its default settings; for a pair (method with objective), of both together."""
    objective = method.objective
    parts: list[Any] = [method] if isinstance(objective, CrossEntropy) else [objective, method]
    summary, settings = _summary(type(method)), _settings(type(method))
    if len(parts) > 1:
        summary = f"{type(method).__name__} with {type(objective).__name__}: {_summary(type(objective))}"
        settings |= {f"objective.{key}": value for key, value in _settings(type(objective)).items()}
    theta = torch.zeros(1)
    client_state = {**method.client_state(theta), **objective.client_state(theta)}
    up, down = 1 + len(method.tracked), 1 + len({*method.downlink, *objective.downlink})
    if not method.federated:
        up, down = 0, 0
    sent = {"all": "", "embed": " body"}.get(method.travels, " all but BatchNorm")
    facts = {
        "paper": next((p.paper for p in parts if p.paper), ""),
        "up": f"×{up}{sent}" + (f" + {len(method.numbers)} number" if method.numbers else ""),
        "down": f"×{down}{sent}",
        "client keeps": ", ".join(client_state) or "–",
        "extra computation": ", ".join(p.computation for p in parts if p.computation) or "–",
    }
    return CatalogEntry(name, summary, settings, facts)


def _settings(cls: Any) -> dict[str, str]:
    fields = [f for f in dataclasses.fields(cls) if f.metadata.get("config", True)]
    return {f.name: f.metadata.get("default", _default_text(f.default)) for f in fields}


def _inline_yaml(tree: Any) -> str:
    """The tree as one line of YAML that can be pasted into a config."""
    return yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, width=1000).strip()


def _function_entry(name: str, function: Any) -> CatalogEntry:
    automatic = ("input_shape", "classes", "data_dir")  # filled in by the config, not by the user
    parameters = {n: p for n, p in inspect.signature(function).parameters.items() if n not in automatic}
    return CatalogEntry(name, _summary(function), {n: _default_text(p.default) for n, p in parameters.items()})


def _summary(documented: Any) -> str:
    """The first line of the docstring."""
    return (inspect.getdoc(documented) or "").split("\n", 1)[0].rstrip(".")


def _default_text(default: Any) -> str:
    if default in (dataclasses.MISSING, inspect.Parameter.empty):
        return "required"
    if default is None:
        return "–"
    if isinstance(default, bool):
        return str(default).lower()
    return str(list(default)) if isinstance(default, tuple) else str(default)
