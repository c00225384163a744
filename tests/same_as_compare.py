"""What differs between two run directories, in words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

METRICS = "metrics.jsonl"
BEST_MODEL, BEST_TENSORS = "model-best.safetensors", "best."  # which versions before 0.3 do not keep
# of a record: how long it took, accidents of worker processes, and why it was the last, which is new
NOT_COMPARED = ("seconds", "events", "stopped")


def compared_files(folder: Path) -> dict[str, bytes]:
    """The contents of the files that must be the same, by their names: models, checkpoints, client states, metrics."""
    paths = [*folder.rglob("*.safetensors"), *folder.glob(METRICS)]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def differing_files(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[str]:
    """A phrase for each file that differs; those of the run directory itself come before those of its folders."""
    found = []
    for name in sorted(old.keys() | new.keys(), key=lambda name: (name.count("/"), name)):
        if name not in new:
            found.append(f"{name} is missing")
        elif name not in old:
            found += [] if name == BEST_MODEL else [f"{name} should not be there"]
        elif name == METRICS:
            found += [f"{name}: {phrase}" for phrase in differing_records(old[name], new[name])[:1]]
        elif old[name] != new[name]:
            found += [f"{name}: {phrase}" for phrase in differing_tensors(old[name], new[name])]
    return found


def differing_records(old: bytes, new: bytes) -> list[str]:
    """A phrase for each figure that differs between two metrics.jsonl."""
    before, now = ([_figures(line) for line in content.splitlines()] for content in (old, new))
    found = [] if len(before) == len(now) else [f"{len(before)} lines became {len(now)}"]
    for number, (left, right) in enumerate(zip(before, now, strict=False), start=1):
        keys = [key for key in left | right if left.get(key) != right.get(key)]
        found += [f"line {number}, {key}: {left.get(key)} became {right.get(key)}" for key in keys]
        if not keys and list(left) != list(right):
            found.append(f"line {number}: the keys come in another order")
    return found


def _figures(line: bytes) -> dict[str, str]:
    """The values of a record, each as its JSON text, so that -0.0 is not 0.0 and 1 is not 1.0."""
    return {key: json.dumps(value) for key, value in json.loads(line).items() if key not in NOT_COMPARED}


def differing_tensors(old: bytes, new: bytes) -> list[str]:
    """A phrase about how two safetensors files differ that are not equal; none if only the best model is new."""
    before, now = tensors(old), tensors(new)
    added = {name for name in now.keys() - before.keys() if name.startswith(BEST_TENSORS)}
    if lone := sorted(before.keys() ^ (now.keys() - added)):
        return [f"the tensor {lone[0]} is {'missing' if lone[0] in before else 'new'}"]
    names = [name for name in before if not np.array_equal(before[name], now[name])]
    if not names:
        return [] if added else ["all tensors are equal, but the header (names, types, shapes, metadata) differs"]
    left, right = before[names[0]], now[names[0]]
    many = f"{(left != right).any(axis=1).sum():,} of {len(left):,} entries" if left.shape == right.shape else "size"
    more = f", and {len(names) - 1} more tensors differ" if len(names) > 1 else ""
    return [f"{names[0]} differs in {many}{more}"]


def tensors(content: bytes) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as bytes, [entries, bytes of an entry]."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    data = np.frombuffer(content, dtype=np.uint8)[start:]
    parts = {name: (data[slice(*entry["data_offsets"])], math.prod(entry["shape"])) for name, entry in header.items()}
    return {name: part.reshape(entries, -1 if entries else 1) for name, (part, entries) in parts.items()}
