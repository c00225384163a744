"""The folder that a personalization leaves behind: there whole or not at all. And how a client's model is read from it.

RUN/personal/none/client-00012.safetensors    what client 12 tuned, under its names in the model's state dict
RUN/personal/clients.csv                      a line per client and row
RUN/personal/summary.json                     the settings, and the figures of every row
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

from fedadc.errors import FedadcError, require
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
from fedadc.runs.record import model_facts, model_origin
from fedadc.system.files import flush_folder, folder_lock, to_safetensors, write_files

AT_ONCE = 256  # files that are flushed side by side


def check_place(folder: Path, overwrite: bool) -> None:
    """Refuse a place that holds something; with `overwrite`, only something else than a personalization."""
    require(not folder.exists() or folder.is_dir(), f"{folder} is a file; --out needs a folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    require(overwrite, f"{folder} is there already; choose another --out, or give --overwrite to replace it.")
    strange = foreign_in_personal(folder)
    require(not strange, f"{folder} holds {', '.join(strange[:3])}, which is no part of one; choose another --out.")


class PersonalFolder:
    """Where a personalization is written; under its own name only when it is whole."""

    def __init__(self, path: Path, round: int) -> None:
        self.path, self.round = path, round
        self.part = path.with_name(path.name + PARTIAL)
        self._waiting: list[tuple[Path, bytes]] = []

    @classmethod
    @contextmanager
    def written(cls, path: Path, round: int) -> Iterator[PersonalFolder]:
        folder = cls(path, round)
        try:
            with folder_lock(folder.part):
                try:
                    _empty(folder.part)
                    yield folder
                    folder._flush()
                except BaseException:
                    _empty(folder.part)
                    raise
            folder._take_its_place()
        except OSError as error:
            raise FedadcError(f"cannot write to {path} ({error.strerror or error}).") from error
        finally:
            with suppress(OSError):
                folder.part.rmdir()  # if it is empty

    def keep(self, way: str, client: int, tuned: dict[str, Tensor]) -> None:
        """What a client tuned; written with the next ones."""
        (self.part / way).mkdir(exist_ok=True)
        content = to_safetensors(tuned, model_facts(f"client {client}, {way},", self.round))
        self._waiting.append((self.part / way / personal_file(client), content))
        if len(self._waiting) >= AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        write_files(self._waiting)
        self._waiting.clear()

    def keep_texts(self, texts: dict[str, str]) -> None:
        self._waiting += [(self.part / name, text.encode()) for name, text in texts.items()]

    def _take_its_place(self) -> None:
        old = self.path.with_name(f"{self.path.name}-old{PARTIAL}")
        if self.path.is_dir():
            shutil.rmtree(old, ignore_errors=True)
            self.path.rename(old)
        self.part.rename(self.path)
        flush_folder(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)


def _empty(folder: Path) -> None:
    for below in folder.iterdir():
        if below.is_dir():
            shutil.rmtree(below)
        elif below.name != LOCK:
            below.unlink()


def personal_state_dict(
    run: str | Path, client: int, regularizer: str | None = None, folder: str = PERSONAL
) -> dict[str, Tensor]:
    """A client's whole model from what `personalize` left in a run, for `load_state_dict` of your own module."""
    require(isinstance(client, Integral), f"client must be a number, not {client!r}.")
    place = Path(run) / folder
    summary = _summary(place)
    ways = [way for way in PERSONAL_MODELS if (place / way).is_dir()]
    require(
        regularizer in ways or (regularizer is None and len(ways) == 1),
        f"{place} has the models {', '.join(ways) or 'of nobody'}; say which one as `regularizer`.",
    )
    file = place / (regularizer or ways[0]) / personal_file(client)
    require(file.is_file(), f"{place} has no model of client {client}.")
    tuned = read_weights(file)
    if not summary.get("model"):
        return tuned
    model = Path(run) / Path(str(summary["model"])).name
    require(
        model_origin(model)[1] == model_origin(file)[1],
        f"{file} belongs to the model of round {model_origin(file)[1]}, but {model} is of round "
        f"{model_origin(model)[1]}; personalize again.",
    )
    return read_weights(model) | tuned


def _summary(place: Path) -> dict[str, Any]:
    try:
        summary = json.loads((place / PERSONAL_SUMMARY).read_text(encoding="utf-8"))
        assert isinstance(summary, dict)
    except (OSError, ValueError, RecursionError, AssertionError) as error:
        raise FedadcError(f"{place} holds no personal models; `fedadc personalize` makes them.") from error
    return summary
