"""The model card of an export: what the model was trained with, how good it is, and how it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from fedadc.config.settings import Config
from fedadc.runs.environment import read_facts
from fedadc.system.version import __version__
from fedadc.trained.description import in_words
from fedadc.trained.load import LoadedRun
from fedadc.trained.snippets import snippet

NO_FIGURES = ("lr", "seconds", "virtual_seconds")  # of a record
MOST_LISTED = 1000  # features in the card; model.json has all
BITS = (
    "`torch` and `onnx` take raw inputs (of a table: encoded rows, as above) and normalize them; a `state_dict` needs "
    "normalized ones. Outputs are "
    "logits; for a regression, scaled numbers. "
    "The bits of fedadc's own predictions need batches of the same rows, one thread (`torch.set_num_threads(1)`) and "
    "its MKL kernels (`MKL_CBWR`, in environment.json of the run, set before torch is imported)."
)


def card(loaded: LoadedRun, description: Mapping[str, Any], formats: Sequence[str]) -> str:
    """The card as Markdown. Equal exports give equal cards."""
    parts = [
        _title(loaded),
        _data(loaded, description),
        _training(loaded),
        _use(description, formats),
        _again(loaded),
    ]
    return "\n\n".join(parts) + "\n"


def _title(loaded: LoadedRun) -> str:
    config, model = loaded.config, loaded.config.model.name
    whose = "" if loaded.client is None else f" The model is the own one of client {loaded.client}."
    what, count = loaded.preprocessing.spec.task.words
    name = config.label or f"{model} on {_data_name(config)}"
    return (
        f"# {name}\n\nA model that returns {what} of {count}, trained by federated learning with fedadc: "
        f"{model}, {loaded.agreement.model.theta.numel():,} parameters, after round {loaded.round or 'unknown'}.{whose}"
    )


def _data(loaded: LoadedRun, description: Mapping[str, Any]) -> str:
    known, inputs = loaded.recorded, description["input"]
    clients = len(known.clients) if known.clients is not None else loaded.config.data.clients
    samples = ", ".join(f"{count:,} {split}" for split, count in known.samples.items())
    rows = [
        ("data set", _data_name(loaded.config)),
        ("clients", f"{clients or 'not known'}" + (f": {_listed(known.clients)}" if known.clients else "")),
        ("samples", samples or "not known"),
        ("outputs, in order", _listed(loaded.classes or [t.name for t in loaded.preprocessing.spec.targets])),
        ("one input", f"{inputs['shape']}, {inputs['dtype']}"),
    ]
    return "## Data\n" + _table(("", ""), rows) + "\n\n" + _inputs(inputs)


def _data_name(config: Config) -> str:
    """The name of the data set, or of the file or folder that it was read from."""
    return config.data.name if config.data.path is None else Path(config.data.path).name


def _inputs(inputs: Mapping[str, Any]) -> str:
    if "features" not in inputs:
        constants = inputs["normalization"]
        scale = "" if constants["scale"] == 1 else f" / {constants['scale']:g}"
        if constants["mean"]:
            values = f"mean {constants['mean']}, std {constants['std']}"
            return f"Normalization, per channel: (x{scale} - mean) / std, {values}."
        return f"Normalization: x{scale}." if scale else "Inputs are not normalized."
    features = inputs["features"]
    listed = _table(("feature", "value"), [(str(i), in_words(f)) for i, f in enumerate(features[:MOST_LISTED])])
    more = f"\n\nmodel.json has all {len(features)} features." if len(features) > MOST_LISTED else ""
    missing = ", ".join(repr(text) for text in inputs["missing"])
    spelled = "in any case and any spelling of a number"
    return f"{listed}{more}\n\nA field is missing if it is one of {missing}, {spelled}. Unknown categories are all 0."


def _training(loaded: LoadedRun) -> str:
    tree, last = loaded.tree, loaded.history[-1]
    method = [(f"`{key}`", f"`{json.dumps(tree.get(key))}`") for key in ("method", "objective", "local", "cohort")]
    figures = [
        (name, f"{value:.4f}") for name, value in last.items() if isinstance(value, float) and name not in NO_FIGURES
    ]
    names = [target.name for target in loaded.preprocessing.spec.targets]
    for name, values in last.items():
        if "per_target" in name and isinstance(values, list) and len(values) == len(names):
            each = zip(names, values, strict=True)
            figures.append((name, ", ".join(f"{own} {'–' if v is None else f'{v:.4f}'}" for own, v in each)))
    of_model = "the run's" if loaded.client is None else "those of all clients together, in this run's"
    return (
        "## Training\n" + _table(("setting", "value"), method)
        + f"\n\nFigures of round {last['round']}, {of_model} last:\n\n" + _table(("figure", "value"), figures)
    )  # fmt: skip


def _use(description: Mapping[str, Any], formats: Sequence[str]) -> str:
    """A program for each format that runs as it stands, in the folder of the card."""
    programs = [f"As `{form}`:\n\n```python\n{snippet(description, form)}```" for form in formats]
    module, _, name = description["class"].partition(":")
    if "state_dict" in formats and not module.startswith("fedadc."):
        needs = f"imports the class {name} of the model from {module}, which is not in this folder"
        programs.insert(0, f"The program for `state_dict` {needs}: put {module}.py, and what it imports, beside it.")
    return "\n\n".join(["## Use", *programs, BITS])


def _again(loaded: LoadedRun) -> str:
    facts = read_facts(loaded.path)
    versions = ", ".join(f"{name} {facts[name]}" for name in ("fedadc", "torch", "python") if name in facts)
    config = yaml.safe_dump(loaded.tree, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    return (
        f"## How it was made\nTrained with {versions or 'versions that are not known'}; exported with fedadc "
        f"{__version__}, torch {torch.__version__}. With this text as config.yaml, `fedadc run config.yaml` trains it "
        f"again.\n\n```yaml\n{config}```"
    )


def _listed(names: Sequence[str] | None, most: int = 50) -> str:
    names = names or ()
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _table(header: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [header, ("---", "---"), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )
