"""What `personalize` was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedadc.config.settings import Config
from fedadc.errors import require
from fedadc.personal.calibrate import Calibration, Layers, calibration_work
from fedadc.runs.layout import PERSONAL


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for, the same for all runs."""

    clients: str | Sequence[int] | None = None  # e.g. "0-9,12"; None: all
    regularizers: Sequence[str] = ("none",)
    layers: Layers = "head"
    model: str | None = None  # PERSONAL of model-PERSONAL.safetensors; None: the model by which the run is judged
    data: Path | None = None  # what the clients hold now
    epochs: int = 2
    lr: float | None = None  # None: the run's local.lr
    mu: float | None = None
    lam: float | None = None

    def calibration(self, config: Config) -> Calibration:
        given = {name: value for name in ("mu", "lam") if (value := getattr(self, name)) is not None}
        work = calibration_work(config.local, self.epochs, self.lr)
        calibration = Calibration(work=work, layers=self.layers, **given)
        for name, regularizer in (("mu", "prox"), ("lam", "confidence")):
            idle = getattr(self, name) is not None and regularizer not in self.regularizers
            require(not idle, f"--{name} is for --regularizer {regularizer}, which was not asked for.")
        for regularizer in self.regularizers:
            calibration.method(regularizer)  # if it is one
        return calibration

    def place(self, run: Path) -> Path:
        return run / (PERSONAL if self.data is None else f"{PERSONAL}-{self.data.stem}")


def client_numbers(asked: str | Sequence[int] | None, names: Sequence[str]) -> list[int]:
    """The numbers that a text such as 0-9,12 means, in order and each once; a client's name is as good."""
    clients, number = len(names), {name: k for k, name in enumerate(names)}
    if asked is None:
        return list(range(clients))
    found: set[int] = set()
    for word in asked.split(",") if isinstance(asked, str) else asked:
        if str(word).strip() in number:
            found.add(number[str(word).strip()])
            continue
        first, dash, last = str(word).strip().partition("-")
        right = first.isdecimal() and (last.isdecimal() if dash else True) and len(first + last) < 40
        require(right, f"--clients: {str(word)[:40]!r} is not a client, a client's number or a range such as 0-9.")
        low, high = int(first), int(last or first)
        require(low <= high, f"--clients: {word} begins after its end.")
        require(high < clients, f"--clients: there is no client {high}; the run has the clients 0 to {clients - 1}.")
        found |= set(range(low, high + 1))
    return sorted(found)
