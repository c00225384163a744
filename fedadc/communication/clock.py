"""A virtual clock: how long a round would take on clients with given speed, bandwidth and latency.

Times are computed from bytes and steps; nothing really waits. The server is synchronous: a round ends when the slowest
client that reports has sent its upload. Links do not share bandwidth.
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
from fedadc.errors import DataError, FedadcError, kind_of_failure, one_line, require, require_file, undefined
from fedadc.fields.settings import Settings

MAX_TRACE = 2**28  # bytes
MIN_BANDWIDTH = 1e-3  # bytes per second
MAX_VALUE = 1e12  # of any setting of a client


@dataclass(frozen=True, kw_only=True)
class Distribution(Settings):
    """Base class of all distributions. Subclasses implement `draw`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            within = not isinstance(value, int | float) or 0 <= value <= MAX_VALUE
            require(within, f"{name} must be between 0 and {MAX_VALUE:g}, not {value}.")

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """One value for each of `count` clients."""
        raise undefined(self, "draw(count, rng)")

    @staticmethod
    def of_number(value: float) -> dict[str, Any]:
        """The settings that a plain number in a config stands for."""
        return {"name": "constant", "value": value}


@dataclass(frozen=True, kw_only=True)
class Fixed(Distribution):
    """The same value for every client. A plain number in the config means the same."""

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
        require(self.low <= self.high, f"low must be at most high, not {self.low} and {self.high}.")

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        return rng.uniform(self.low, self.high, count)


@dataclass(frozen=True, kw_only=True)
class LogNormal(Distribution):
    """Log-normal: most clients are near the median, a few are far slower or faster."""

    median: float
    sigma: float = 0.5  # standard deviation of the logarithm

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.median > 0, f"median must be above 0, not {self.median}.")
        require(0 <= self.sigma <= 20, f"sigma must be in [0, 20], not {self.sigma}.")

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        return self.median * np.exp(self.sigma * rng.standard_normal(count))


@dataclass(frozen=True, kw_only=True)
class ShiftedExponential(Distribution):
    """`low` plus an exponentially distributed value with the given mean."""

    mean: float
    low: float = 0.0

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        return self.low + rng.exponential(self.mean, count)


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    "constant": Fixed, "uniform": Between, "lognormal": LogNormal, "exponential": ShiftedExponential,
}  # fmt: skip


@dataclass(frozen=True)
class Devices:
    """Speed, bandwidth and latency of every client, one array [clients] each."""

    step_seconds: Array  # seconds per local step
    down: Array  # bytes per second
    up: Array  # bytes per second
    latency: Array  # seconds per message

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            least = MIN_BANDWIDTH if name in ("down", "up") else 0.0
            invalid = np.flatnonzero(~((values >= least) & (values <= MAX_VALUE)))
            if len(invalid):
                client = invalid[0]
                raise FedadcError(
                    f"clock.{name} must be between {least:g} and {MAX_VALUE:g}, but client {client} has "
                    f"{values[client]:g}."
                )

    def fingerprint(self) -> Tensor:
        """A checksum of the values of all clients."""
        content = b"".join(values.astype(np.float64).tobytes() for values in vars(self).values())
        return torch.tensor(list(hashlib.sha256(content).digest()), dtype=torch.uint8)

    def receiving(self, clients: Array, size: Array | int) -> Array:
        """Seconds until each client has received a message of `size` bytes; 0 if there is nothing to send."""
        return np.where(np.asarray(size) > 0, self.latency[clients] + size / self.down[clients], 0.0)

    def sending(self, clients: Array, size: Array | int) -> Array:
        """Seconds until each client has sent a message of `size` bytes; 0 if there is nothing to send."""
        return np.where(np.asarray(size) > 0, self.latency[clients] + size / self.up[clients], 0.0)

    def computing(self, clients: Array, steps: Array) -> Array:
        """Seconds that each client needs for its local steps."""
        return np.asarray(steps * self.step_seconds[clients])


@dataclass(frozen=True, kw_only=True)
class Clock(Settings):
    """The settings of the virtual clock: values are drawn once per client, or read from a file."""

    step_seconds: Distribution = field(default_factory=lambda: Fixed(value=0.01))  # seconds per local step
    down: Distribution = field(default_factory=lambda: Fixed(value=1e6))  # bytes per second
    up: Distribution = field(default_factory=lambda: Fixed(value=1e6))  # bytes per second
    latency: Distribution = field(default_factory=lambda: Fixed(value=0.05))  # seconds per message
    trace: str | None = None  # instead: a CSV file with the columns client, step_seconds, down, up, latency

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace is None:
            return
        defaults = {f.name: f.default_factory() for f in fields(self) if callable(f.default_factory)}
        given = [name for name, default in defaults.items() if getattr(self, name) != default]
        require(not given, f"trace already gives the values of all clients; leave out {', '.join(given)}.")

    def devices(self, names: Sequence[Any], rng: np.random.Generator) -> Devices:
        """The values of the clients with these names."""
        if self.trace is not None:
            return read_trace(Path(self.trace), names)
        return Devices(**{f.name: getattr(self, f.name).draw(len(names), rng) for f in fields(Devices)})


def read_trace(path: Path, clients: Sequence[str]) -> Devices:
    """Read the values of all clients from a CSV file, one line per client, in any order.

    `clients` are the names of the clients; if the data has no client names, they are the numbers from 0.
    """
    require_file(path, "clock.trace")
    require(path.stat().st_size <= MAX_TRACE, f"clock.trace: {path} is larger than {MAX_TRACE} bytes.", DataError)
    names = [f.name for f in fields(Devices)]
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            table = csv.DictReader(stream, strict=True)
            rows, columns = list(table), table.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise kind_of_failure(error)(f"clock.trace: {path} cannot be read ({one_line(error)}).") from error
    missing = [name for name in ("client", *names) if name not in columns]
    require(not missing, f"clock.trace: {path} has no column {', '.join(missing)}.", DataError)
    values, number = np.full((len(clients), len(names)), np.nan), {name: k for k, name in enumerate(clients)}
    for line, row in enumerate(rows, start=2):
        where, client = f"clock.trace: {path}, line {line}", str(row["client"]).strip()
        if client not in number:
            raise DataError(f"{where}: there is no client {client:.40}; the clients are {', '.join(clients[:3])}, ...")
        require(bool(np.isnan(values[number[client]]).all()), f"{where}: client {client} is listed twice.", DataError)
        values[number[client]] = _parsed(row, names, where)
    absent = np.flatnonzero(np.isnan(values).any(axis=1))
    if len(absent):
        raise DataError(f"clock.trace: {path} has no line for client {clients[absent[0]]}.")
    return Devices(*values.T.copy())


def _parsed(row: dict[str, Any], names: Sequence[str], where: str) -> list[float]:
    try:
        values = [float(row[name]) for name in names]
    except (TypeError, ValueError):
        raise DataError(f"{where} must contain a client and four numbers.") from None
    require(not any(map(np.isnan, values)), f"{where}: a number is missing.", DataError)
    return values
