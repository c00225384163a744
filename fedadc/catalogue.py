"""What can be named in a config, with settings and defaults; and the starter config."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, field
from typing import Any

from fedadc.errors import unknown

STARTER = """\
# A run of FedADC. Train with: fedadc run THIS_FILE     Change a setting: fedadc run THIS_FILE local.lr=0.05
seed: 0                      # everything random derives from it; data.seed and model.seed default to it
rounds: 60
data:
  name: digits               # fedadc list datasets; your own: npz, folder, csv (with path: ...), or module:function
  clients: 50
  partition: {name: sort, labels_per_client: 2}   # fedadc list partitions
  # test: 0.2                # a share (or a file) where the data has no test part
  # validation: 0.1          # a share for choosing settings
  # augment: {crop: 4, flip: true}
model: {name: mlp, hidden: [64, 64]}              # fedadc list models; your own: module:Class
method: {name: fedadc, beta: 0.9, nesterov: true} # fedadc list methods; beta_local defaults to beta, server_lr to 1
objective: {name: cross_entropy}                  # fedadc list objectives; method fedadc+ brings self_confidence
local:
  steps: 8                   # H; or epochs: 2
  batch_size: 16
  lr: 0.1
  # schedule: {name: cosine} # fedadc list schedules
  weight_decay: 0.0
  momentum: 0.0
  # clip: 10.0               # largest norm of the gradient
cohort: {size: 10}           # clients per round; or ratio: 0.2
evaluate: {every: 1}         # rounds; metrics: [top5, macro_f1, per_class]
# stop: {accuracy: 0.95}     # end early
"""


@dataclass(frozen=True)
class Entry:
    name: str
    summary: str
    settings: dict[str, str] = field(default_factory=dict)


def entries(what: str) -> list[Entry]:
    """The rows of one table."""
    from fedadc.data import DATASETS
    from fedadc.data.partition import PARTITIONS
    from fedadc.federation.schedule import SCHEDULES
    from fedadc.methods import METHODS, PAIRS
    from fedadc.models import MODELS
    from fedadc.objectives import OBJECTIVES

    if what == "datasets":
        return [_of_function(name, loader) for name, loader in DATASETS.items()]
    if what == "models":
        return [_of_function(name, cls) for name, cls in MODELS.items()]
    tables: dict[str, dict[str, Any]] = {
        "methods": METHODS, "objectives": OBJECTIVES, "partitions": PARTITIONS, "schedules": SCHEDULES,
    }  # fmt: skip
    if what not in tables:
        raise unknown("table", what, [*tables, "datasets", "models"])
    rows = [_of_dataclass(name, cls) for name, cls in tables[what].items()]
    if what == "methods":
        for short, (name, objective) in PAIRS.items():
            settings = _of_dataclass(name, METHODS[name]).settings
            also = _of_dataclass(objective, OBJECTIVES[objective]).settings
            rows.append(
                Entry(
                    short,
                    f"{name} with objective {objective}",
                    settings | {f"objective.{k}": v for k, v in also.items()},
                )
            )
    return rows


def _of_dataclass(name: str, cls: Any) -> Entry:
    fields = [f for f in dataclasses.fields(cls) if f.metadata.get("config", True)]
    return Entry(name, _summary(cls), {f.name: f.metadata.get("default", _show(f.default)) for f in fields})


def _of_function(name: str, function: Any) -> Entry:
    given = ("input_shape", "classes", "data_dir")
    parameters = {n: p for n, p in inspect.signature(function).parameters.items() if n not in given}
    return Entry(name, _summary(function), {n: _show(p.default) for n, p in parameters.items()})


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
