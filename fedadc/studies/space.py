"""What a sweep searches: for each key of a config a list of values, or a range.

Both are written as on the command line: `0.01,0.1`, `[8],[16,16]` (a bracketed list is one value), `0.001..1,log`,
`1..16,int`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fedadc.analysis.compare import short_key
from fedadc.config.yaml import parse_yaml
from fedadc.errors import require
from fedadc.fields.values import leaf, show

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})((?:,(?:log|int))*)")
EDGE = 0.05  # the share of a range, at either end, that counts as its edge
MOST_POINTS = 10_000  # of a grid
Point = dict[str, Any]  # key -> value


@dataclass(frozen=True)
class ValueList:
    """Values to choose from."""

    key: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        require(bool(self.values), f"{self.key} has no values; write e.g. {self.key}=0.01,0.1.")
        for position, value in enumerate(self.values):
            require(self.index(value) == position, f"{self.key} has the value {show(value)} twice.")

    def index(self, value: Any) -> int | None:
        """The position of a value; None if it is not in the list."""
        return next((i for i, other in enumerate(self.values) if _text(other) == _text(value)), None)

    @property
    def ends(self) -> tuple[Any, ...]:
        return self.values

    @property
    def written(self) -> Any:
        """As a file of a sweep has it."""
        return list(self.values)

    def edge(self, value: Any) -> str:
        """`smallest` or `largest` if the value is at the end of an ordered list of numbers."""
        if len(self.values) < 2 or any(isinstance(v, bool) or not isinstance(v, int | float) for v in self.values):
            return ""
        return "smallest" if value == min(self.values) else "largest" if value == max(self.values) else ""


@dataclass(frozen=True)
class ValueRange:
    """Numbers from `low` to `high`, both included."""

    key: str
    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high,
            f"{self.key}: the range {self.written} needs a low end below its high end.",
        )
        require(not self.log or self.low > 0, f"{self.key}: the range {self.written} needs a low end above 0 for log.")
        require(
            not self.whole or (isinstance(self.low, int) and isinstance(self.high, int)),
            f"{self.key}: the range {self.written} needs whole numbers at both ends for int.",
        )

    @property
    def ends(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def written(self) -> str:
        return f"{self.low}..{self.high}" + ",log" * self.log + ",int" * self.whole

    def position(self, value: float) -> float:
        """Where a value stands: 0 at the low end, 1 at the high end."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low)

    def at(self, position: float) -> float:
        """The value at a position between 0 and 1."""
        low, high = (math.log(end) if self.log else end for end in self.ends)
        value = low + position * (high - low)
        return math.exp(value) if self.log else value

    def edge(self, value: Any) -> str:
        """`smallest` or `largest` if the value is at an end, or, in a range without gaps, close to it."""
        margin = 0.0 if self.whole else EDGE
        at = self.position(value)
        return "smallest" if at <= margin else "largest" if at >= 1 - margin else ""


Dimension = ValueList | ValueRange


def read_space(search: Mapping[str, Any]) -> list[Dimension]:
    """The dimensions of a search: key -> a list of values, or a text as on the command line, or one value."""
    require(bool(search), "there is nothing to sweep; name at least one key with its values, e.g. local.lr=0.01,0.1.")
    return [_dimension(key, given) for key, given in search.items()]


def _dimension(key: str, given: Any) -> Dimension:
    require(all(key.split(".")), f"{key!r} is not a key such as local.lr.")
    require(key != "seed", "seed is not swept; name the seeds of every setting with `seeds`.")
    if isinstance(given, list | tuple):
        return ValueList(key, tuple(leaf(Any, value, key) for value in given))
    if not isinstance(given, str):
        return ValueList(key, (leaf(Any, given, key),))
    found = RANGE.fullmatch(text := "".join(given.split()))
    if found and "..." not in text:
        return _range(key, found[1], found[2], found[3])
    require(
        not re.match(rf"{NUMBER}\.\.", text),
        f"{key}: {given!r} is not a range; write LOW..HIGH, LOW..HIGH,log or LOW..HIGH,int.",
    )
    values = parse_yaml(f"[{given}]", f"the list of values of {key}")
    return ValueList(key, tuple(leaf(Any, value, key) for value in values))


def _range(key: str, low: str, high: str, options: str) -> ValueRange:
    names = options.split(",")[1:]
    whole = "int" in names and not any(re.search(r"[.eE]", end) for end in (low, high))
    kind = int if whole else float
    return ValueRange(key, kind(low), kind(high), "log" in names, "int" in names)


def parse_searches(texts: Sequence[str]) -> dict[str, str]:
    """The search that `KEY=V1,V2 ...` on a command line describes."""
    search: dict[str, str] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        require(bool(equals and key), f"{text!r} is not a key with its values; write e.g. local.lr=0.01,0.1.")
        require(key not in search, f"{key} is given twice; name all its values at once, e.g. {key}=0.01,0.1.")
        search[key] = values
    return search


def grid(space: Sequence[Dimension]) -> list[Point]:
    """All combinations of the values; the last key changes fastest."""
    lists = [d for d in space if isinstance(d, ValueList)]
    for dimension in space:
        require(
            dimension in lists,
            f"{dimension.key} is a range, and a grid needs values; list them, or use the sampler random or tpe.",
        )
    count = math.prod(len(d.values) for d in lists)
    require(count <= MOST_POINTS, f"the grid has {count} settings, more than {MOST_POINTS}; list fewer values.")
    return [dict(zip([d.key for d in lists], values, strict=True)) for values in product(*(d.values for d in lists))]


def spanned(columns: Mapping[str, Sequence[Any]]) -> list[Dimension]:
    """The lists of values that occur among settings, given by their keys."""
    return [
        ValueList(key, tuple({_text(value): value for value in values}.values())) for key, values in columns.items()
    ]


def corners(space: Sequence[Dimension], most: int = 256) -> Iterator[Point]:
    """All combinations of the ends of ranges and of listed values; if these are too many, one key after another."""
    keys = [d.key for d in space]
    if math.prod(len(d.ends) for d in space) <= most:
        yield from (dict(zip(keys, ends, strict=True)) for ends in product(*(d.ends for d in space)))
    else:
        yield from one_after_another(space)


def one_after_another(space: Sequence[Dimension]) -> Iterator[Point]:
    """The first value of every key, then each further value of each key alone."""
    first = {d.key: d.ends[0] for d in space}
    yield first
    for dimension in space:
        yield from ({**first, dimension.key: value} for value in dimension.ends[1:])


def edges(space: Sequence[Dimension], point: Point, may_change: bool = True) -> list[str]:
    """A sentence for each key whose value stands at the edge of its grid or range, which a user may change or not."""
    found = []
    for d in space:
        if side := d.edge(point[d.key]):
            kind, wanted = "grid" if isinstance(d, ValueList) else "range", side.replace("est", "er")
            limits = f"{brief(min(d.ends))} to {brief(max(d.ends))}"
            advice = f"try {wanted} values" if may_change else f"{wanted} values may be better"
            found.append(
                f"the best {d.key}, {brief(point[d.key])}, stands at the edge of its {kind}, {limits}; {advice}"
            )
    return found


def brief(value: Any) -> str:
    """A value in a table: a sampled number with four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace('"', "")


def described(point: Mapping[str, Any]) -> str:
    """A point in a table."""
    return " ".join(f"{short_key(tuple(key.split('.')))}={brief(value)}" for key, value in point.items())


def _text(value: Any) -> str:
    """The same text for the same value: 1 is 1.0, but True is not."""
    return json.dumps(float(value) if isinstance(value, int) and not isinstance(value, bool) else value, sort_keys=True)
