"""The folder of a personalization: written completely or not at all; and how to load a client's model from it.

RUN/personal/none/client-00012.safetensors    the parameters that client 12 tuned, named as in the model's state dict
RUN/personal/clients.csv                      a line per client and row of the table
RUN/personal/summary.json                     the settings, and the statistics of every row
RUN/personal/personal.png
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import Tensor

from fedadc.data.roster import client_place
from fedadc.errors import DataError, DiskError, require
from fedadc.models.build import read_weights
from fedadc.runs.layout import (
    LOCK,
    PARTIAL,
    PERSONAL,
    PERSONAL_MODELS,
    PERSONAL_SUMMARY,
    foreign_in_personal,
    personal_file,
)
from fedadc.runs.preprocessing import read_preprocessing
from fedadc.runs.record import model_facts, model_origin
from fedadc.system.files import flush_folder, folder_lock, to_safetensors, write_files

BATCH = 256  # files that are written and flushed to the disk together


def check_target(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that is not empty; with `overwrite`, one that contains files of another origin."""
    require(not folder.exists() or folder.is_dir(), f"{folder} is a file; `out` needs a folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    require(overwrite, f"{folder} already exists; choose another `out`, or use `overwrite` to replace it.")
    foreign = ", ".join(foreign_in_personal(folder)[:3])
    require(not foreign, f"{folder} contains {foreign}, which `personalize` did not write; choose another `out`.")


class PersonalFolder:
    """The folder of a personalization while it is written. It gets its final name when it is complete."""

    def __init__(self, path: Path, round: int) -> None:
        self.path, self.round = path, round
        self.partial = path.with_name(path.name + PARTIAL)
        self._pending: list[tuple[Path, bytes]] = []

    @classmethod
    @contextmanager
    def create(cls, path: Path, round: int) -> Iterator[PersonalFolder]:
        """A folder for models of this round; it replaces the one at `path` at the end, unless there was an error."""
        folder = cls(path, round)
        try:
            with folder_lock(folder.partial):
                try:
                    _empty(folder.partial)
                    yield folder
                    folder._flush()
                except BaseException:
                    _empty(folder.partial)
                    raise
            folder._replace_target()
        except OSError as error:
            raise DiskError(f"cannot write to {path} ({error.strerror or error}).") from error
        finally:
            with suppress(OSError):
                folder.partial.rmdir()  # fails if it is not empty

    def add_model(self, variant: str, client: int, tuned: dict[str, Tensor]) -> None:
        """Add the tuned parameters of a client; `variant` is the regularizer, or "own" for stored models."""
        (self.partial / variant).mkdir(exist_ok=True)
        content = to_safetensors(tuned, model_facts(f"client {client}, {variant},", self.round))
        self._pending.append((self.partial / variant / personal_file(client), content))
        if len(self._pending) >= BATCH:
            self._flush()

    def _flush(self) -> None:
        write_files(self._pending)
        self._pending.clear()

    def add_texts(self, texts: dict[str, str]) -> None:
        """Add text files: name -> content."""
        self._pending += [(self.partial / name, text.encode()) for name, text in texts.items()]

    def _replace_target(self) -> None:
        old = self.path.with_name(f"{self.path.name}-old{PARTIAL}")
        if self.path.is_dir():
            shutil.rmtree(old, ignore_errors=True)
            self.path.rename(old)
        self.partial.rename(self.path)
        flush_folder(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def personal_state_dict(
    run: str | Path, client: int | str, regularizer: str | None = None, folder: str = PERSONAL
) -> dict[str, Tensor]:
    """The state dict of a client's whole model after `personalize`; load it with `load_state_dict` of your module.

    `client` is a number, as in the names of the files, or the name that the data gives it.
    """
    require(isinstance(client, Integral | str), f"client must be a number or a name, not {client!r:.60}.")
    path = Path(run) / folder
    number = _number_of(client, Path(run)) if isinstance(client, str) else int(client)
    summary = _read_summary(path)
    variants = [name for name in PERSONAL_MODELS if (path / name).is_dir()]
    require(bool(variants), f"{path} contains no model of any client; run `fedadc personalize` again.", DataError)
    require(
        regularizer in variants or (regularizer is None and len(variants) == 1),
        f"{path} contains models for {', '.join(variants)}; set `regularizer` to one of them.",
    )
    file = path / (regularizer or variants[0]) / personal_file(number)
    require(file.is_file(), f"{path} has no model of client {client}.")
    tuned = read_weights(file)
    if not summary.get("model"):
        return tuned
    model = Path(run) / Path(str(summary["model"])).name
    tuned_round, model_round = model_origin(file)[1], model_origin(model)[1]
    require(
        tuned_round == model_round,
        f"{file} was tuned from the model of round {tuned_round}, but {model} is of round {model_round}; "
        "personalize again.",
        DataError,
    )
    return read_weights(model) | tuned


def _number_of(name: str, run: Path) -> int:
    known = read_preprocessing(run)
    if known is not None and known.clients is not None:
        return client_place(name, known.clients)
    require(
        name.isdecimal(), f"client must be a number, not {name!r:.60}: the data of {run} does not name its clients."
    )
    return int(name)


def _read_summary(folder: Path) -> dict[str, Any]:
    try:
        summary = json.loads((folder / PERSONAL_SUMMARY).read_text(encoding="utf-8"))
        assert isinstance(summary, dict)
    except (OSError, ValueError, RecursionError, AssertionError) as error:
        raise DataError(f"{folder} contains no personal models; create them with `fedadc personalize`.") from error
    return summary
