"""The form of a design: panels with rows to train, and claims about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FINAL = "final"  # accuracy: mean over the last ten rounds
HALFWAY = "halfway"  # accuracy at half of the rounds
EARLY = "early"  # accuracy at a fifth of the rounds
LOST = "lost"  # accuracy: the highest of any round, minus the final one
VIRTUAL = "virtual"  # virtual seconds of the whole run
GAIN = "gain of "  # accuracy that the clients' own models gain by calibration; then the regularizer's name


Grid = Mapping[str, Sequence[Any]]  # key.sub -> values


@dataclass(frozen=True)
class Row:
    """A curve of a figure or a row of a table: one method, to be trained with every seed."""

    label: str
    changes: Mapping[str, Any]  # over the config of its panel
    importance: int = 0  # with a budget, the lowest are trained first
    grids: Mapping[str, Grid] = field(default_factory=dict)  # what is searched, by scale
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # where no grid is searched, by scale


@dataclass(frozen=True)
class Panel:
    """A plot of a figure or a column of a table: rows that share data, model and rounds."""

    name: str
    title: str
    base: Mapping[str, Any]  # a config without method and seed
    rows: tuple[Row, ...]  # in the order of the paper
    reported: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # label -> mean and std in percent
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # beside the scale's: scale -> key -> value
    remark: str = ""  # where even the published scale departs from the paper


@dataclass(frozen=True)
class Term:
    """A figure of one row, times a factor."""

    factor: float
    panel: str
    label: str
    measure: str = FINAL


@dataclass(frozen=True)
class Statement:
    """A sum of terms, computed seed by seed, lies between two bounds."""

    terms: tuple[Term, ...]
    low: float = 0.0
    high: float = math.inf
    relative_to: Term | None = None  # the sum is divided by this


@dataclass(frozen=True)
class Claim:
    """What the paper says, as statements that must all be true."""

    text: str
    source: str  # where the paper says it
    statements: tuple[Statement, ...]
    reported: str = ""  # the paper's figure
    only_as_published: bool = False  # it means nothing on other data, or with fewer rounds


@dataclass(frozen=True)
class Design:
    """A figure or table of the paper."""

    name: str
    title: str
    source: str
    panels: tuple[Panel, ...]
    claims: tuple[Claim, ...]
    seeds: int = 4  # trials in the paper
    measures: tuple[str, ...] = (FINAL,)  # in its table
    x: str = "round"  # the horizontal axis of its picture
    regularizers: tuple[str, ...] = ()  # of a calibration after training

    def panel(self, name: str) -> Panel:
        return next(panel for panel in self.panels if panel.name == name)


def higher(panel: str, better: str, worse: str, measure: str = FINAL) -> Statement:
    """One row of a panel is above another."""
    return Statement((Term(1, panel, better, measure), Term(-1, panel, worse, measure)))


def alike(first: tuple[str, str], second: tuple[str, str], margin: float) -> Statement:
    """Two rows, each of a panel, differ by less than a margin."""
    return Statement((Term(1, *first), Term(-1, *second)), -margin, margin)
