"""The Python of a model card: for each format a program that runs as it stands, in the folder of the export."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from fedadc.data.spelling import MAX_MAGNITUDE

HEAD = """{standard}

{imports}

with open("model.json", encoding="utf-8") as file:
    description = json.load(file)
"""
ENCODE = """
def number(text):
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= {largest!r} and "_" not in text else None


missing = {*description["input"]["missing"], *map(number, description["input"]["missing"])} - {None}


def read(value):  # a field as a number or a text; None: it is missing
    text = "" if value is None or value != value else unicodedata.normalize("NFC", str(value).strip())
    found = number(text)
    if text.lower() in missing or found in missing:
        return None
    return text if found is None else found


def category(field):  # 1, 1.0 and "1.0" are the category 1
    if not isinstance(field, float):
        return "(missing)" if field is None else field
    return str(int(field)) if field == int(field) and abs(field) < 2**53 else repr(field)


{own}def encode(row):  # the columns of one row by name, as texts or numbers
    values, known = [], {}
    for feature in description["input"]["features"]:
        name = feature["column"]
        field = read(row[name])
        if "category" in feature:
            values.append(float(feature["category"] == category(field)))
            known[name] = known.get(name, 0.0) + values[-1]
        elif "is_missing" in feature:
            values.append(float(field is None))
        elif isinstance(field, str):
            raise ValueError(f"column {name}: {field!r} is not a number")
        else:
            center, spread = {constants}
            values.append(0.0 if field is None else (field - center) / spread)
    for name in known:
        if not known[name]:
            print(f"column {name}: training did not have the category {row[name]!r}; all its features are 0")
    return values


rows = [{example}]
x = torch.tensor([encode(row) for row in rows], dtype=torch.{dtype})
"""
OWN_SCALES = """def alike(text):  # what spellings of a client have in common; 1, 1.0 and " +1 " are the client 1
    parts = re.fullmatch(r"([+-]?)(0|[1-9][0-9]*)(?:[.]([0-9]*))?", text)
    if parts:
        fraction = (parts[3] or "").rstrip("0")
        digits = parts[2] + ("." + fraction if fraction else "")
        text = "-" + digits if parts[1] == "-" and digits != "0" else digits
    if not description["input"]["merge_names"]:
        return text
    text = "".join(text.casefold().split())
    return text.lstrip("0") or "0" if text.isascii() and text.isdigit() else text


scales = {alike(name): constants for name, constants in description["input"]["scales"].items()}


def scales_of(row):  # center and spread of every column of numbers, those of the client of the row
    name = row.get({client}, {only})
    text = "" if name is None else unicodedata.normalize("NFC", str(name).strip())
    if alike(text) not in scales:
        known = ", ".join(description["input"]["scales"])
        raise ValueError(f"no scale is known for the client {text!r}, only for {known}")
    return scales[alike(text)]


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
    standard = ["json", *(["re"] if "scales" in inputs else []), *(["unicodedata"] if "features" in inputs else [])]
    return (
        HEAD.format(standard="\n".join(f"import {name}" for name in standard), imports=imports[form])
        + _inputs(inputs)
        + use[form]
        + shown
    )


def _inputs(inputs: Mapping[str, Any]) -> str:
    if "features" in inputs:
        by_client = "scales" in inputs
        fills = {
            "{own}": _own_scales(inputs) if by_client else "",
            "{constants}": "scales_of(row)[name]" if by_client else 'feature["center"], feature["spread"]',
            "{dtype}": inputs["dtype"],
            "{largest!r}": repr(MAX_MAGNITUDE),
            "{example}": repr(_example(inputs)),
        }
        return "\n" + reduce(lambda text, mark: text.replace(mark, fills[mark]), fills, ENCODE)
    shape = ", ".join(map(str, (1, *inputs["shape"])))
    return RAW.format(shape=shape, dtype=inputs["dtype"])


def _own_scales(inputs: Mapping[str, Any]) -> str:
    """The part that finds the constants of a row's client; a model of one client need not be told whose row it is."""
    only = next(iter(inputs["scales"])) if len(inputs["scales"]) == 1 else None
    return OWN_SCALES.replace("{client}", repr(inputs["client"])).replace("{only}", repr(only))


def _example(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table: centers, and the first category of every column."""
    row: dict[str, Any] = {}
    if "scales" in inputs:
        row[inputs["client"]], centers = next(iter(inputs["scales"].items()))
        row |= {name: center for name, (center, _) in centers.items()}
    for feature in inputs["features"]:
        value = feature.get("category", feature.get("center", ""))
        row.setdefault(feature["column"], value)
    return row


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
