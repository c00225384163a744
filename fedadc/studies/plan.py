"""What a reproduction trains: the rows of a design at a scale, first with every setting of their grids, then final."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedadc.config.settings import Config
from fedadc.config.yaml import with_values
from fedadc.errors import require, unknown
from fedadc.runs.record import load_config
from fedadc.studies.experiment import setting_hash
from fedadc.studies.paper.design import Design, Grid, Panel, Row
from fedadc.studies.paper.designs import DESIGNS
from fedadc.studies.paper.scales import AS_PUBLISHED, SCALES, Scale
from fedadc.studies.queue import Job
from fedadc.system.files import checksum

MOST_LETTERS = 100  # of a file name
TUNING_SEED = 1000  # of the runs that choose a setting: none of those in the result
Setting = dict[str, Any]  # key.sub -> value
Key = tuple[str, str]  # panel and label


@dataclass(frozen=True)
class PlannedRow:
    """A row of a panel at a scale."""

    panel: Panel
    row: Row
    tree: dict[str, Any]  # its config, without seed
    grid: Grid  # {}: nothing is searched
    validation: float

    @property
    def key(self) -> Key:
        return self.panel.name, self.row.label

    def settings(self) -> list[Setting]:
        """Every setting of the grid."""
        return [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]

    def run(self, out: Path, setting: Setting, seed: int, tuning: bool = False) -> PlannedRun:
        """The run with one setting and one seed. To choose a setting, some of the training data is held out."""
        held_out = {"data.validation": self.validation} if tuning else {}
        tree = with_values(self.tree, {**setting, **held_out})
        config = load_config({**tree, "seed": seed})
        job = Job(self.row.label, config, out / ("tuning" if tuning else "runs") / folder_name(config))
        return PlannedRun(self, setting, seed, tuning, job)


@dataclass(frozen=True)
class PlannedRun:
    row: PlannedRow
    setting: Setting
    seed: int
    tuning: bool  # it is trained to choose a setting, and is not in the result
    job: Job


def folder_name(config: Config) -> str:
    """The folder of a run: by its label, and by all its settings, so that designs share the runs that they share."""
    return f"{slug(config.label or 'run')}/{setting_hash(config)}-seed{config.seed}"


def slug(label: str) -> str:
    """A label as a part of a file name."""
    return re.sub(r"[^\w+]+", "-", label.lower()).strip("-")


@dataclass(frozen=True)
class ReproductionPlan:
    """A design, the scale, the seeds and the rows to train."""

    design: Design
    scale: Scale
    seeds: tuple[int, ...]
    rows: tuple[PlannedRow, ...]  # the most important first
    left_out: tuple[Key, ...] = ()  # rows that were not asked for

    @property
    def file_stem(self) -> str:
        """The name of the files with the result; that of a part of a design never replaces that of the whole."""
        parts = [self.design.name]
        if self.left_out:
            parts += dict.fromkeys(slug(row.row.label) for row in self.in_order())
        if self.seeds != tuple(range(self.scale.seeds_of(self.design))):
            parts.append("seeds-" + "-".join(map(str, self.seeds)))
        stem = "-".join(parts)
        return stem if len(stem) <= MOST_LETTERS else f"{stem[:MOST_LETTERS]}-{checksum(stem.encode())[:8]}"

    def in_order(self) -> list[PlannedRow]:
        """The rows in the order of the paper."""
        order = [(panel.name, row.label) for panel in self.design.panels for row in panel.rows]
        return sorted(self.rows, key=lambda row: order.index(row.key))

    def tuning_runs(self, out: Path) -> list[PlannedRun]:
        """A run for every setting of every grid."""
        searched = [row for row in self.rows if row.grid]
        return [row.run(out, setting, TUNING_SEED, True) for row in searched for setting in row.settings()]

    def final_runs(self, out: Path, chosen: Mapping[Key, Setting]) -> list[PlannedRun]:
        """The runs of the result: the first seed of all rows, then the second, ... Rows without a choice have none."""
        rows = [row for row in self.rows if row.key in chosen]
        return [row.run(out, chosen[row.key], seed) for seed in self.seeds for row in rows]

    def chosen(self, scores: Mapping[Key, Sequence[tuple[Setting, float | None]]]) -> dict[Key, Setting]:
        """The best setting of every row by its scores; of equal ones the first. None: training diverged.

        A row of which a setting was not tried has no choice.
        """
        chosen: dict[Key, Setting] = {}
        for row in self.rows:
            tried = [(setting, score) for setting, score in scores.get(row.key, ()) if score is not None]
            if not row.grid:
                chosen[row.key] = {}
            elif tried and len(scores[row.key]) == len(row.settings()):
                chosen[row.key] = max(tried, key=lambda one: one[1])[0]
        return chosen

    def title(self, panel: Panel) -> str:
        """The title of a panel, with the data on which it is trained here."""
        return f"{self.scale.tree(panel, panel.rows[0])['data']['name']}, {panel.title}"

    def on_papers_data(self, panel: Panel) -> bool:
        return bool(self.scale.tree(panel, panel.rows[0])["data"]["name"] == panel.base["data"]["name"])

    def changes(self) -> list[str]:
        """What differs from the published settings, line by line."""
        return list(dict.fromkeys(_changes(self)))


def plan_of(
    name: str, scale: str | Scale, seeds: Sequence[int] | None = None, only: Sequence[str] = ()
) -> ReproductionPlan:
    """The plan of a figure or table; `only` names the methods to train."""
    if name not in DESIGNS:
        raise unknown("figure or table", name, DESIGNS)
    if isinstance(scale, str) and scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    design, chosen = DESIGNS[name], SCALES[scale] if isinstance(scale, str) else scale
    labels = {row.label.lower(): row.label for panel in design.panels for row in panel.rows}
    for method in only:
        if method.lower() not in labels:
            raise unknown("method", method.lower(), labels)
    wanted = {labels[method.lower()] for method in only} or set(labels.values())
    numbers = range(chosen.seeds_of(design)) if seeds is None else seeds
    require(len(numbers) > 0, "seeds must name at least one seed.")
    require(len(set(numbers)) == len(numbers), f"seeds must not name a seed twice: {list(numbers)}.")
    entries = [(panel, row) for panel in design.panels for row in panel.rows]
    rows = tuple(
        PlannedRow(panel, row, chosen.tree(panel, row), row.grids.get(chosen.grids, {}), chosen.validation)
        for panel, row in sorted(entries, key=lambda entry: entry[1].importance)
        if row.label in wanted
    )
    require(
        TUNING_SEED not in numbers or not any(row.grid for row in rows),
        f"seed {TUNING_SEED} chooses the settings, so it cannot be in the result; name other seeds.",
    )
    left_out = tuple((panel.name, row.label) for panel, row in entries if row.label not in wanted)
    return ReproductionPlan(design, chosen, tuple(numbers), rows, left_out)


def _changes(plan: ReproductionPlan) -> Iterator[str]:
    design, scale = plan.design, plan.scale
    for panel in design.panels:
        if panel.remark:
            yield panel.remark
    if len(plan.seeds) != design.seeds:
        yield f"seeds: {len(plan.seeds)} instead of {design.seeds}"
    for panel in design.panels:
        published, here = (_leaves(of.tree(panel, Row("", {}))) for of in (AS_PUBLISHED, scale))
        for key in {**published, **here}:
            if published.get(key) != here.get(key):
                yield f"{key}: {_shown(here.get(key))} instead of {_shown(published.get(key))}"
    for row in plan.rows:
        grid = row.row.grids.get(AS_PUBLISHED.name, {})
        if scale.name == AS_PUBLISHED.name or grid == row.grid:
            continue
        searched, instead = (
            ", ".join(f"{key} {_shown(values)}" for key, values in of.items()) for of in (grid, row.grid)
        )
        fixed = ", ".join(f"{key} {value}" for key, value in row.row.settings.get(scale.name, {}).items())
        used = f"searches {instead}" if instead else fixed or "the settings of its preset"
        yield f"{row.row.label}: {used} instead of searching {searched}"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).replace("'", "")
