"""The manifest of a checkpoint: which files belong to it, with checksums that detect damaged ones."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedadc.errors import one_line
from fedadc.runs.layout import checkpoint_name, client_state_file
from fedadc.system.files import checksum

FORMAT = 1


@dataclass(frozen=True)
class FilePrefix:
    """The first bytes of a file that grows: how many, and their checksum."""

    bytes: int
    checksum: str


EMPTY_PREFIX = FilePrefix(0, "")


@dataclass(frozen=True)
class Manifest:
    """What belongs to a checkpoint. File names are derived from numbers, so none can point outside the run."""

    format: int
    round: int
    horizon: int
    config: str  # fingerprint of the settings that decide the result
    data: str  # checksum of the samples, of the partition, and of the parts of the model that are not trained
    state: str  # checksum of the file with theta and the server's state
    metrics: FilePrefix
    clients: list[tuple[int, int, str]]  # client, round of its state, checksum of its file

    @property
    def name(self) -> str:
        return checkpoint_name(self.round)

    def state_files(self) -> list[str]:
        """The file names of the client states."""
        return [client_state_file(client, round) for client, round, _ in self.clients]


class UnusableCheckpoint(Exception):
    """A checkpoint is damaged or belongs to something else; the text says why."""


def encode(manifest: Manifest) -> bytes:
    tree = asdict(manifest)
    return json.dumps({"checksum": checksum(_canonical(tree)), "manifest": tree}).encode()


def decode(content: bytes) -> Manifest:
    try:
        outer = json.loads(content)
        tree, expected = outer["manifest"], outer["checksum"]
        version = tree["format"]
        undamaged = checksum(_canonical(tree)) == expected
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnusableCheckpoint("it is truncated or damaged") from None
    if version != FORMAT:
        raise UnusableCheckpoint(f"its format is {version!r:.20}, but this version of fedadc reads format {FORMAT}")
    if not undamaged:
        raise UnusableCheckpoint("it is damaged: its checksum is wrong")
    try:
        return TypeAdapter(Manifest).validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise UnusableCheckpoint(f"it is not a manifest of fedadc ({one_line(error)[:100]})") from None


def _canonical(tree: object) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def read_tensors(path: Path, expected: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file whose checksum is known."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = read_file(path)
    if checksum(content) != expected:
        raise UnusableCheckpoint(f"{path.name} is truncated, damaged or belongs to another checkpoint")
    try:
        tensors: dict[str, Tensor] = load(content)
    except SafetensorError as error:
        raise UnusableCheckpoint(f"{path.name} is not a safetensors file ({one_line(error)})") from None
    return tensors


def read_file(path: Path) -> bytes:
    if not path.is_file():  # a pipe would never end
        raise UnusableCheckpoint(f"{path.name} is missing, or not a file")
    return path.read_bytes()
