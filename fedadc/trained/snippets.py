"""The Python of a model card: for each format a program that runs as it stands, in the folder of the export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = """import json

{imports}

with open("model.json", encoding="utf-8") as file:
    description = json.load(file)
"""
ENCODE = """
def encode(row):  # the columns of one row by name, as texts or numbers
    values = []
    for feature in description["input"]["features"]:
        text = str(row[feature["column"]]).strip()
        missing = text.lower() in description["input"]["missing"]
        if "category" in feature:
            values.append(float(feature["category"] == ("(missing)" if missing else text)))
        elif "is_missing" in feature:
            values.append(float(missing))
        else:
            values.append(0.0 if missing else (float(text) - feature["center"]) / feature["spread"])
    return values


rows = [{example}]
x = torch.tensor([encode(row) for row in rows], dtype=torch.{dtype})
"""
PIXEL_BY_PIXEL = """x = torch.empty_strided(x.shape, {strides}, dtype=x.dtype).copy_(x)  # the memory format of training
"""
RAW = """x = torch.zeros({shape}, dtype=torch.{dtype})  # raw inputs, as in the data set; 1 is their number
"""
STATE_DICT = """module = {name}(**description["arguments"])
module.load_state_dict(load_file("model.safetensors"))
module.eval()
with torch.no_grad():
    outputs = module({normalized})
"""
RUN_PROGRAM = """with torch.no_grad():
    outputs = torch.export.load("model.pt2").module()(x)
"""
ONNX = """session = onnxruntime.InferenceSession("model.onnx")
outputs = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
"""
CLASSES = """for probabilities in outputs.softmax(dim=1).tolist():
    print(dict(zip(description["output"]["classes"], probabilities)))
"""
NUMBERS = """for row in outputs.tolist():
    targets = zip(description["output"]["targets"], row)
    print({target["name"]: value * target["spread"] + target["center"] for target, value in targets})
"""


def snippet(description: Mapping[str, Any], form: str) -> str:
    """A program that predicts with one format of an export."""
    module, _, name = description["class"].partition(":")
    imports = {
        "state_dict": f"import torch\nfrom safetensors.torch import load_file\n\nfrom {module} import {name}",
        "torch": "import torch",
        "onnx": "import onnxruntime\nimport torch",
    }
    inputs, shown = description["input"], CLASSES if "classes" in description["output"] else NUMBERS
    use = {
        "state_dict": _pixel_by_pixel(inputs) + STATE_DICT.format(name=name, normalized=_normalized(inputs)),
        "torch": RUN_PROGRAM,
        "onnx": ONNX,
    }
    return HEAD.format(imports=imports[form]) + _inputs(inputs) + use[form] + shown


def _inputs(inputs: Mapping[str, Any]) -> str:
    if "features" in inputs:
        row = {f["column"]: f.get("category", f.get("center")) for f in reversed(inputs["features"])}
        example = {name: "" if value is None else value for name, value in reversed(row.items())}
        return "\n" + ENCODE.replace("{example}", repr(example)).replace("{dtype}", inputs["dtype"])
    shape = ", ".join(map(str, (1, *inputs["shape"])))
    return RAW.format(shape=shape, dtype=inputs["dtype"])


def _pixel_by_pixel(inputs: Mapping[str, Any]) -> str:
    if not inputs["channels_last"]:
        return ""
    channels, height, width = inputs["shape"]
    strides = (height * width * channels, 1, width * channels, channels)
    return PIXEL_BY_PIXEL.format(strides=strides)


def _normalized(inputs: Mapping[str, Any]) -> str:
    """The normalization of x as an expression; the exported programs have it inside."""
    constants = inputs["normalization"]
    scale = constants["scale"]
    if not constants["mean"]:
        return "x" if scale == 1 else f"x / {scale!r}"
    shape = [-1, *[1] * (len(inputs["shape"]) - 1)]
    mean, std = (f"torch.tensor({constants[name]!r}).view({shape}) * {scale!r}" for name in ("mean", "std"))
    return f"(x - {mean}) / ({std})"
