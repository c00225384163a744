"""The settings of `personalize`, their record, and which clients a text such as 0-9,12 selects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedadc.config.settings import Config
from fedadc.data.roster import are_numbered, client_place
from fedadc.errors import require
from fedadc.fields.settings import Settings
from fedadc.personal.calibrate import Calibration, Layers, calibration_work
from fedadc.personal.results import ResultRow
from fedadc.runs.layout import PERSONAL
from fedadc.views.local_work import MOST


@dataclass(frozen=True, kw_only=True)
class Request(Settings):
    """The settings of a personalization, the same for all runs."""

    clients: str | Sequence[int] | None = None  # e.g. "0-9,12"; None: all
    regularizers: tuple[str, ...] = ("none",)
    layers: Layers = "head"
    model: str | None = None  # NAME of model-NAME.safetensors; None: the run's main model, model.safetensors
    data: Path | None = None  # the clients' new data; None: the data of the run
    epochs: int = 2
    lr: float | None = None  # None: the run's local.lr
    mu: float | None = None
    lam: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.epochs <= MOST, f"epochs must be at least 1 and at most {MOST}, not {self.epochs}.")
        if self.lr is not None:
            require(0 < self.lr <= 1e30, f"lr must be positive and at most 1e30, not {self.lr}.")

    def calibration(self, config: Config) -> Calibration:
        """How the clients of a run with this config tune their models."""
        given = {name: value for name in ("mu", "lam") if (value := getattr(self, name)) is not None}
        work = calibration_work(config.local, self.epochs, self.lr)
        calibration = Calibration(work=work, layers=self.layers, **given)
        for name, regularizer in (("mu", "prox"), ("lam", "confidence")):
            unused = getattr(self, name) is not None and regularizer not in self.regularizers
            require(not unused, f"`{name}` is for the regularizer {regularizer}, which is not given.")
        for regularizer in self.regularizers:
            calibration.method(regularizer, config.task_name)  # refuses one that does not fit
        return calibration

    def folder(self, run: Path) -> Path:
        """The folder for the results of a run."""
        return run / (PERSONAL if self.data is None else f"{PERSONAL}-{self.data.stem}")


def summary_text(
    label: str,
    round: int,
    model: str | None,
    request: Request,
    calibration: Calibration | None,  # None: the method stores a model for each client
    rows: Sequence[ResultRow],
) -> str:
    """The content of summary.json: the settings, and the statistics of every row."""
    tree: dict[str, Any] = {
        "run": label,
        "model": model,
        "round": round,
        "data": None if request.data is None else str(request.data),
    }
    if calibration is not None:
        names = ("epochs", "batch_size", "lr", "momentum", "weight_decay", "clip")
        settings = {name: getattr(calibration.work, name) for name in names}
        if not calibration.work.optimizer.plain:
            settings["optimizer"] = repr(calibration.work.optimizer)
        tree |= {"layers": request.layers, "settings": {**settings, "mu": calibration.mu, "lam": calibration.lam}}
    return json.dumps({**tree, "rows": [row.as_dict() for row in rows]}, indent=2) + "\n"


def client_numbers(selected: str | Sequence[int] | None, names: Sequence[str]) -> list[int]:
    """The sorted numbers of the clients that a text such as 0-9,12 selects; clients may also be given by name.

    Where names are numbers, so are the numbers in the text: 1-3 are the clients named 1, 2 and 3.
    """
    clients, number = len(names), {name: k for k, name in enumerate(names)}
    if selected is None:
        return list(range(clients))
    found: set[int] = set()
    for word in selected.split(",") if isinstance(selected, str) else selected:
        if str(word).strip() in number:
            found.add(number[str(word).strip()])
            continue
        first, dash, last = str(word).strip().partition("-")
        valid = first.isdecimal() and (last.isdecimal() if dash else True) and len(first + last) < 40
        require(valid, f"clients: {str(word)[:40]!r} is not a client's name, its number or a range such as 0-9.")
        low, high = int(first), int(last or first)
        require(low <= high, f"clients: the range {word} begins after its end.")
        if not are_numbered(names):
            found |= {client_place(k, names) for k in range(low, high + 1)}
            continue
        require(high < clients, f"clients: there is no client {high}; the run has the clients 0 to {clients - 1}.")
        found |= set(range(low, high + 1))
    return sorted(found)
