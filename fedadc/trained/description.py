"""What an exported model is, as JSON: its class and arguments, its inputs with every feature in order, its outputs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fedadc.data.encoding import TableEncoding
from fedadc.data.features import MISSING_CATEGORY, Column
from fedadc.data.schema import DataSchema
from fedadc.errors import require
from fedadc.models import MODELS
from fedadc.trained.load import LoadedRun

DESCRIPTION_FORMAT = 1


def description_of(loaded: LoadedRun) -> dict[str, Any]:
    """The content of model.json. Equal models give equal descriptions."""
    schema, model = loaded.preprocessing, loaded.config.model
    maker = loaded.config.schema.lookup("model", model.name, MODELS)
    from_data = {"input_shape": list(schema.shape), "classes": schema.spec.task.outputs[0]}
    parameters = inspect.signature(maker).parameters
    constants = schema.normalization
    return {
        "format": DESCRIPTION_FORMAT,
        "class": model.name if ":" in model.name else f"{maker.__module__}:{maker.__name__}",
        "arguments": {**{name: value for name, value in from_data.items() if name in parameters}, **model.options},
        "input": {
            "shape": list(schema.shape),
            "dtype": str(loaded.agreement.inputs.kind).removeprefix("torch."),
            "normalization": {"scale": constants.scale, "mean": list(constants.mean), "std": list(constants.std)},
            "channels_last": loaded.agreement.inputs.channels_last,
            **_features(schema),
        },
        "output": {"task": schema.spec.task.name, **_outputs(schema)},
    }


def _outputs(schema: DataSchema) -> dict[str, Any]:
    if schema.classes:
        return {"classes": list(schema.classes)}
    return {"targets": [asdict(target) for target in schema.spec.targets]}  # a number is output * spread + center


def _features(schema: DataSchema) -> dict[str, Any]:
    encoding = schema.encoding
    if encoding is None:
        return {}
    features = [feature for column in encoding.columns for feature in features_of_column(column)]
    found = {"missing": encoding.spelling.in_lower_case, "features": features}
    own = [column.name for column in encoding.columns if column.by_client]
    return found | (_scales(encoding, own) if own else {})


def _scales(encoding: TableEncoding, own: Sequence[str]) -> dict[str, Any]:
    """The constants of columns that every client scales by its own, and how its rows name it."""
    require(
        bool(encoding.scales),
        "the run's numbers are scaled by every client's own constants (data.scale: per-client), which only its sites "
        "know; export the model at a site, from the folder that it keeps of the run.",
    )
    constants = {name: dict(zip(own, map(list, several), strict=True)) for name, several in encoding.scales.items()}
    return {"client": encoding.client, "merge_names": encoding.spelling.merge_names, "scales": constants}


def features_of_column(column: Column) -> list[dict[str, Any]]:
    """The features of a column, in order: a category, a number that is scaled, or whether the number is missing."""
    if column.categories is not None:
        return [{"column": column.name, "category": category} for category in column.categories]
    constants = {"scale": "client"} if column.by_client else {"center": column.center, "spread": column.spread}
    return [
        {"column": column.name, **constants},
        *([{"column": column.name, "is_missing": True}] if column.has_missing else []),
    ]


def in_words(feature: dict[str, Any]) -> str:
    """How one feature is made of a column, for the model card."""
    name = feature["column"]
    if "category" in feature:
        category = feature["category"]
        return f"1 if {name} is {'missing' if category == MISSING_CATEGORY else repr(category)}, else 0"
    if "is_missing" in feature:
        return f"1 if {name} is missing, else 0"
    if "scale" in feature:
        made = f"({name} - center) / spread, by the constants of the row's client in model.json"
    elif feature["center"] != 0 or feature["spread"] != 1:
        made = f"({name} - {feature['center']!r}) / {feature['spread']!r}"
    else:
        made = name
    return f"{made}; 0 if it is missing"
