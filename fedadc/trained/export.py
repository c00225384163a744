"""`fedadc export`: a trained model in formats that others read, with a description and a model card.

The same run gives the same bytes. A folder is written file by file, each completely or not at all; the card comes last.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from fedadc.errors import DiskError, require, unknown
from fedadc.system.files import to_safetensors, write_file
from fedadc.system.user_code import Notes
from fedadc.trained.card import card
from fedadc.trained.description import description_of
from fedadc.trained.load import LoadedRun, load
from fedadc.trained.program import onnx_bytes, torch_bytes, torch_program

log = logging.getLogger("fedadc")
FILE_OF_FORMAT = {"state_dict": "model.safetensors", "torch": "model.pt2", "onnx": "model.onnx"}
DESCRIPTION, CARD = "model.json", "README.md"


def export(
    run: str | Path,
    out: str | Path,
    *,
    format: str | Sequence[str] = "state_dict",
    model: str | None = None,
    client: str | int | None = None,
    regularizer: str | None = None,
    overwrite: bool = False,
    data_dir: str | Path | None = None,
    trust: bool = False,
    notes: Notes = log.info,
) -> list[Path]:
    """Write the model of a run into a folder as `state_dict` (safetensors), `torch` (torch.export) or `onnx`.

    Several formats may be given. The folder also gets model.json, a description, and README.md, a model card. `model`,
    `client`, `regularizer`, `data_dir` and `trust` are those of `load`. Returns the files.
    """
    formats = tuple(dict.fromkeys([format] if isinstance(format, str) else format))
    require(bool(formats), f"format must be one or several of {', '.join(FILE_OF_FORMAT)}.")
    for name in formats:
        if name not in FILE_OF_FORMAT:
            raise unknown("format", name, FILE_OF_FORMAT)
    folder = Path(out)
    stale = _check_folder(folder, formats, overwrite)
    loaded = load(run, model=model, client=client, regularizer=regularizer, data_dir=data_dir, trust=trust, notes=notes)
    loaded.require_head()
    contents = _contents(loaded, formats)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in stale:
            file.unlink()
        for name, content in contents.items():
            write_file(folder / name, content)
    except OSError as error:
        raise DiskError(f"cannot write to {folder} ({error.strerror or error}).") from error
    return [folder / name for name in contents]


def _check_folder(folder: Path, formats: Sequence[str], overwrite: bool) -> list[Path]:
    """Refuse a folder with other files; returns the files of an earlier export, which are replaced."""
    require(not folder.exists() or folder.is_dir(), f"{folder} is a file; `out` needs a folder.")
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    require(
        overwrite or not found, f"{folder} is not empty; choose another `out`, or use `overwrite` to replace an export."
    )
    ours = {*FILE_OF_FORMAT.values(), DESCRIPTION, CARD}
    foreign = [path.name for path in found if path.name not in ours or not path.is_file()]
    require(
        not foreign, f"{folder} contains {', '.join(foreign[:3])}, which no export has written; choose another `out`."
    )
    return found


def _contents(loaded: LoadedRun, formats: Sequence[str]) -> dict[str, bytes]:
    """The files by name, the card last."""
    inputs, shape = loaded.agreement.inputs, loaded.preprocessing.shape
    found: dict[str, bytes] = {}
    for name in formats:
        if name == "state_dict":
            found[FILE_OF_FORMAT[name]] = to_safetensors(loaded.state_dict)
        else:  # ONNX has no memory formats
            program = torch_program(loaded.module, inputs, shape, inputs.channels_last and name == "torch")
            found[FILE_OF_FORMAT[name]] = torch_bytes(program) if name == "torch" else onnx_bytes(program)
    description = description_of(loaded)
    found[DESCRIPTION] = json.dumps(description, indent=1, ensure_ascii=False).encode() + b"\n"
    found[CARD] = card(loaded, description, formats).encode()
    return found
