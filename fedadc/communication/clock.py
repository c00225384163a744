"""A virtual clock: how long a round would take on clients of given speed behind links of given bandwidth and latency.

Nothing waits: times follow from bytes and steps. A synchronous server waits for the slowest client that reports; links
do not share their bandwidth.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedadc.data.dataset import Array
from fedadc.errors import FedadcError, one_line, require, require_file, require_types, undefined

LARGEST_TRACE = 2**28  # bytes
SLOWEST, LARGEST = 1e-3, 1e12  # bytes per second; of any figure


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Base of all distributions; subclass it and write `draw`."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(0 <= value <= LARGEST, f"clock: {name} must lie between 0 and {LARGEST:g}, not {value}.")

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        raise undefined(self, "draw(count, rng)")

    @staticmethod
    def of_number(value: float) -> dict[str, Any]:
        """A bare number in a config."""
        return {"name": "constant", "value": value}


@dataclass(frozen=True, kw_only=True)
class Fixed(Distribution):
    """The same for every client; a bare number says it too."""

    value: float

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        return np.full(count, self.value)


@dataclass(frozen=True, kw_only=True)
class Between(Distribution):
    """Uniform between two values."""

    low: float
    high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.low <= self.high, f"clock: uniform needs low <= high, not {self.low} and {self.high}.")

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        return rng.uniform(self.low, self.high, count)


@dataclass(frozen=True, kw_only=True)
class LogNormal(Distribution):
    """Its logarithm is normal: most clients near the median, a few far slower or quicker."""

    median: float
    sigma: float = 0.5  # of the logarithm

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.median > 0, f"clock: lognormal needs a median above 0, not {self.median}.")
        require(0 <= self.sigma <= 20, f"clock: lognormal needs a sigma in [0, 20], not {self.sigma}.")

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        return self.median * np.exp(self.sigma * rng.standard_normal(count))


@dataclass(frozen=True, kw_only=True)
class ShiftedExponential(Distribution):
    """At least `low`, and on top of it an exponential of the given mean."""

    mean: float
    low: float = 0.0

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        return self.low + rng.exponential(self.mean, count)


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    "constant": Fixed, "uniform": Between, "lognormal": LogNormal, "exponential": ShiftedExponential,
}  # fmt: skip


@dataclass(frozen=True)
class Devices:
    """Every client's figures, [clients] each."""

    step_seconds: Array
    down: Array  # bytes per second
    up: Array
    latency: Array  # seconds, of one message

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            least = SLOWEST if name in ("down", "up") else 0.0
            bad = np.flatnonzero(~((values >= least) & (values <= LARGEST)))
            require(
                not len(bad),
                f"clock.{name} must lie between {least:g} and {LARGEST:g}, but client {bad[0] if len(bad) else 0} has "
                f"{values[bad[0]] if len(bad) else 0:g}.",
            )

    def fingerprint(self) -> Tensor:
        """A checksum of all figures."""
        content = b"".join(values.astype(np.float64).tobytes() for values in vars(self).values())
        return torch.tensor(list(hashlib.sha256(content).digest()), dtype=torch.uint8)

    def receiving(self, clients: Array, size: Array | int) -> Array:
        """Seconds until so many bytes have come down; none where there are none."""
        return np.where(np.asarray(size) > 0, self.latency[clients] + size / self.down[clients], 0.0)

    def sending(self, clients: Array, size: Array | int) -> Array:
        return np.where(np.asarray(size) > 0, self.latency[clients] + size / self.up[clients], 0.0)

    def computing(self, clients: Array, steps: Array) -> Array:
        return np.asarray(steps * self.step_seconds[clients])


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Where the clients' figures come from: each drawn once per client, or all read from a file."""

    step_seconds: Distribution = field(default_factory=lambda: Fixed(value=0.01))  # of one local step
    down: Distribution = field(default_factory=lambda: Fixed(value=1e6))  # bytes per second
    up: Distribution = field(default_factory=lambda: Fixed(value=1e6))
    latency: Distribution = field(default_factory=lambda: Fixed(value=0.05))  # seconds, of one message
    trace: str | None = None  # a CSV file with the columns client, step_seconds, down, up, latency, instead of all that

    def __post_init__(self) -> None:
        require_types(self, "clock", Distribution, Distribution, Distribution, Distribution)
        defaults = {f.name: f.default_factory() for f in fields(self) if callable(f.default_factory)}
        given = [name for name, usual in defaults.items() if getattr(self, name) != usual] if self.trace else []
        require(not given, f"clock.trace has all figures; leave out {', '.join(given)}.")

    def devices(self, names: Sequence[Any], rng: np.random.Generator) -> Devices:
        """Of clients with these names."""
        if self.trace is not None:
            return read_trace(Path(self.trace), names)
        return Devices(**{f.name: getattr(self, f.name).draw(len(names), rng) for f in fields(Devices)})


def read_trace(path: Path, clients: Sequence[str]) -> Devices:
    """A line per client in any order; clients that the data does not name are numbered from 0."""
    require_file(path, "clock.trace")
    require(path.stat().st_size <= LARGEST_TRACE, f"clock.trace: {path} is too large for a list of clients.")
    names = [f.name for f in fields(Devices)]
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            table = csv.DictReader(stream, strict=True)
            rows, columns = list(table), table.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedadcError(f"clock.trace: {path} cannot be read ({one_line(error)}).") from error
    missing = [name for name in ("client", *names) if name not in columns]
    require(not missing, f"clock.trace: {path} has no column {', '.join(missing)}.")
    values, number = np.full((len(clients), len(names)), np.nan), {name: k for k, name in enumerate(clients)}
    for line, row in enumerate(rows, start=2):
        where, client = f"clock.trace: {path}, line {line}", str(row["client"]).strip()
        if client not in number:
            raise FedadcError(f"{where}: there is no client {client:.40}; there are {', '.join(clients[:3])}, ...")
        require(bool(np.isnan(values[number[client]]).all()), f"{where}: client {client} comes again.")
        values[number[client]] = _figures(row, names, where)
    absent = [name for name, known in zip(clients, values, strict=True) if np.isnan(known).any()]
    require(not absent, f"clock.trace: {path} has no line of client {absent[0] if absent else ''}.")
    return Devices(*values.T.copy())


def _figures(row: dict[str, Any], names: Sequence[str], where: str) -> list[float]:
    try:
        figures = [float(row[name]) for name in names]
    except (TypeError, ValueError):
        raise FedadcError(f"{where} is not a client and four figures.") from None
    require(not any(map(np.isnan, figures)), f"{where}: a figure is missing.")
    return figures
