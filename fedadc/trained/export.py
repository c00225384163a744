"""`fedadc export`: a trained model in formats that others read, with a description and a model card.

The same run gives the same bytes. A folder is written under another name, and gets its own when it is complete.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedadc.errors import DiskError, require, unknown
from fedadc.runs.layout import PARTIAL
from fedadc.system.files import flush_folder, to_safetensors, write_files
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
    _check_folder(folder, overwrite)
    loaded = load(run, model=model, client=client, regularizer=regularizer, data_dir=data_dir, trust=trust, notes=notes)
    loaded.require_head()
    contents = _contents(loaded, formats)
    try:
        write_folder(folder, contents)
    except OSError as error:
        raise DiskError(f"cannot write to {folder} ({error.strerror or error}).") from error
    return [folder / name for name in contents]


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder and replace an existing one: a process that is killed leaves the old one or the new one.

    If it is killed between the two renames, the old one is beside it, until the next call. The working directory and
    an empty folder stay where they are and are filled.
    """
    path = folder.resolve()
    partial, old = (path.with_name(f"{path.name}{part}{PARTIAL}") for part in ("", "-old"))
    if path.is_dir() and (path == Path.cwd() or not any(path.iterdir())):
        write_files([(path / name, content) for name, content in contents.items()])
        for file in path.iterdir():
            if file.name not in contents:
                file.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        write_files([(partial / name, content) for name, content in contents.items()])
        if path.is_dir():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        partial.rename(path)
        flush_folder(path.parent)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if old.is_dir() and not path.is_dir():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse a folder with files that are not those of an earlier export."""
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
