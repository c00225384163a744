"""Compare runs: mean ± std over seeds, progress until a target is reached, bytes sent; as a table or JSON."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedadc.errors import FedadcError, require, unknown
from fedadc.evaluation.fairness import fairness_metrics
from fedadc.evaluation.stopping import higher_is_better
from fedadc.fields.summary import short_number
from fedadc.methods import PAIRS
from fedadc.runs.record import RecordedRun
from fedadc.tasks import Classification

log = logging.getLogger("fedadc")
LAST = 10  # a run's final value is the mean over the evaluated ones of its last 10 rounds
SEEDS = {("seed",), ("data", "seed"), ("model", "seed")}
IGNORED = ("storage", "checkpoint")  # top-level keys that do not affect results
Flat = dict[tuple[str, ...], Any]  # path of a setting -> value
NAMES = {("method", "name"), ("objective", "name")}  # shown at the start of a label


@dataclass(frozen=True)
class Axis:
    """A measure of progress: the x axis of a plot."""

    label: str
    keys: tuple[str, ...]  # keys of a record, whose values are added
    per_round: bool  # True if a record has the amount of its round only, not the total so far
    units: tuple[tuple[str, float], ...] = ()  # (name, size), smallest first
    hint: str = ""  # how to record it, for the error message


BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
TIME = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86400.0))
AXES = {
    "round": Axis("round", ("round",), False),
    "bytes": Axis("bytes up and down", ("bytes_up", "bytes_down"), True, BYTES),
    "bytes_up": Axis("bytes up", ("bytes_up",), True, BYTES),
    "bytes_down": Axis("bytes down", ("bytes_down",), True, BYTES),
    "virtual_seconds": Axis("virtual time", ("virtual_seconds",), False, TIME, "; set clock in its config"),
    "seconds": Axis("time", ("seconds",), True, TIME),
    "samples": Axis("samples", ("samples",), True, (("", 1.0), ("thousand", 1e3), ("million", 1e6))),
}


@dataclass(frozen=True)
class Summary:
    """One row of the comparison: the runs of one setting with different seeds."""

    label: str
    seeds: int
    metric: str
    value: float  # mean over seeds of the mean of the last 10 rounds
    std: float | None  # over seeds (n - 1); None for one seed
    best: float  # mean over seeds of the best round
    target: float
    rounds_to_target: float | None  # mean over the seeds that reached it; None if none did
    reached: int
    bytes_up: int  # per client and round
    bytes_down: int
    x: str = "round"  # the measure of progress, a key of AXES
    x_to_target: float | None = None  # mean progress at the target, over the seeds that reached it


def summarize(
    runs: Sequence[RecordedRun], target: float | None = None, metric: str = "test_accuracy", x: str = "round"
) -> list[Summary]:
    """One row per setting, in the order in which the settings first appear. Runs without the metric are left out."""
    require(bool(runs), "no runs to compare; give at least one run directory.")
    kept = with_metric(runs, metric)
    for run in runs:
        if run not in kept:
            log.warning("%s is left out: it has no %s in any round", run.path, metric)
    groups, better = group(kept), max if higher_is_better(metric) else min
    finals = {label: [final(r, metric) for r in members] for label, members in groups.items()}
    require(
        target is None or (isinstance(target, int | float) and (not is_share(metric) or 0 < target <= 1)),
        f"target must be a share such as 0.9, not {target!r:.60}.",
    )
    if target is None:
        best = better(statistics.mean(f) for f in finals.values())
        target = _near(best, higher_is_better(metric))
    progress = {label: [positions(r, x) for r in members] for label, members in groups.items()}
    rows = []
    for label, members in groups.items():
        reached = [(at, _first_round(r, metric, target)) for r, at in zip(members, progress[label], strict=True)]
        rounds = [t for _, t in reached if t is not None]
        x_at_target = [at[t] for at, t in reached if t is not None]
        rows.append(
            Summary(
                label=label,
                seeds=len(members),
                metric=metric,
                value=statistics.mean(finals[label]),
                std=statistics.stdev(finals[label]) if len(members) > 1 else None,
                best=statistics.mean(better(v for _, v in curve(r, metric)) for r in members),
                target=target,
                rounds_to_target=statistics.mean(rounds) if rounds else None,
                reached=len(rounds),
                bytes_up=_per_client(members, "bytes_up"),
                bytes_down=_per_client(members, "bytes_down"),
                x=x,
                x_to_target=statistics.mean(x_at_target) if x_at_target else None,
            )
        )
    return rows


def with_metric(runs: Sequence[RecordedRun], metric: str) -> list[RecordedRun]:
    """The runs in which the metric was evaluated; an error if there is none."""
    kept = [run for run in runs if _points(run, metric)]
    if not kept:
        curve(runs[0], metric)  # raises the error
    return kept


def group(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Groups of runs that differ only in their seeds; each label says how its group differs from the others."""
    flat = [{k: v for k, v in flatten(r.tree).items() if k not in SEEDS and k[0] not in IGNORED} for r in runs]
    first_trees: dict[str, Flat] = {}
    groups: dict[str, list[RecordedRun]] = {}
    for r, tree, label in zip(runs, flat, _labels(flat), strict=True):
        first, members = first_trees.setdefault(label, tree), groups.setdefault(label, [])
        if different := _differences([first, tree]):
            names = ", ".join(".".join(key) for key in different[:3])
            raise FedadcError(f"{r.path} and {members[0].path} are both labeled {label!r} but differ in {names}.")
        for other in members:
            require(
                _seeds(other.tree) != _seeds(r.tree),
                f"{r.path} and {other.path} are the same run: same settings, same seed.",
            )
        members.append(r)
    return groups


def _labels(flat: Sequence[Flat]) -> list[str]:
    """A label for each run: its own and, where runs of the same label differ, the settings in which they do."""
    labels = [str(tree.get(("label",)) or _label(tree, flat)) for tree in flat]
    different = {
        label: _differences([tree for tree, other in zip(flat, labels, strict=True) if other == label])
        for label in set(labels)
    }
    return [
        " ".join([label, *(_setting(tree, key) for key in different[label] if key in tree)])
        for tree, label in zip(flat, labels, strict=True)
    ]


def _differences(trees: Sequence[Flat]) -> list[tuple[str, ...]]:
    """The keys in which settings differ; of keys that are equal everywhere, such as beta and beta_local, the first."""
    keys = dict.fromkeys(key for tree in trees for key in tree)
    values = {key: tuple(_text(tree, key) for tree in trees) for key in keys}
    first = {texts: key for key, texts in reversed(values.items()) if len(set(texts)) > 1}
    return [key for key in keys if first.get(values[key]) == key]


def _seeds(tree: dict[str, Any]) -> list[Any]:
    flat = flatten(tree)
    return [flat.get(key) for key in sorted(SEEDS)]


def _text(tree: Flat, key: tuple[str, ...]) -> str:
    return json.dumps(tree[key], default=str) if key in tree else "absent"


def _label(tree: Flat, others: Sequence[Flat]) -> str:
    """The method's name, and the settings that tell this run apart from runs of the same method."""
    method, objective = (str(tree.get((node, "name"))) for node in ("method", "objective"))
    pairs = {pair: name for name, pair in PAIRS.items()}
    name = method if objective in ("cross_entropy", "None") else f"{method} {objective}"
    shown = []
    for key in tree:
        if key == ("label",) or key in NAMES:
            continue
        node = (key[0], "name")  # compare settings of a method or objective only with runs of the same one
        peers = [t for t in others if node not in NAMES or t.get(node) == tree.get(node)]
        if key not in _differences(peers):
            continue
        values = [_text(t, key) for t in peers]
        count, most = values.count(_text(tree, key)), max(map(values.count, values))
        # Leave out the value that more than half of the runs have, and None where no value is that frequent.
        if len(set(values)) > 1 and ((2 * most <= len(values) and tree[key] is not None) or count < most):
            shown.append(_setting(tree, key))
    return " ".join([pairs.get((method, objective), name), *shown])


def _setting(tree: Flat, key: tuple[str, ...]) -> str:
    return f"{short_key(key)}={'none' if tree[key] is None else tree[key]}"


def short_key(key: tuple[str, ...]) -> str:
    """A key of a config as labels show it: `lr` for local.lr, `model` for model.name."""
    parts = key[:-1] if key[-1] == "name" and len(key) > 1 else key
    return ".".join(parts[1:] if parts[0] in ("method", "objective", "model", "local") and parts[1:] else parts)


def flatten(tree: Any, prefix: tuple[str, ...] = ()) -> Flat:
    """A tree as its leaves."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, value in tree.items() for k, v in flatten(value, (*prefix, str(key))).items()}


def curve(run: RecordedRun, metric: str) -> list[tuple[int, float]]:
    """(round, value) of every round in which the metric was evaluated."""
    points = _points(run, metric)
    if not points:
        several = " as one value, but lists, of a value for each class or target" if _is_list(run, metric) else ""
        recorded = ", ".join(sorted({k for r in run.records for k, v in r.items() if isinstance(v, float)}))
        raise FedadcError(f"{run.path} has no {metric} in any round{several}; it has {recorded}.")
    return points


def _is_list(run: RecordedRun, metric: str) -> bool:
    return any(isinstance(record.get(metric), list) for record in run.records)


def _points(run: RecordedRun, metric: str) -> list[tuple[int, float]]:
    return [(r["round"], float(r[metric])) for r in run.records if isinstance(r.get(metric), int | float)]


def positions(run: RecordedRun, x: str) -> dict[int, float]:
    """The progress of a run after each round, measured by the axis `x`."""
    if x not in AXES:
        raise unknown("x", x, AXES)
    axis, progress, total = AXES[x], {}, 0.0
    for record in run.records:
        values = [v for key in axis.keys if isinstance(v := record.get(key), int | float) and math.isfinite(v)]
        if len(values) < len(axis.keys):
            raise FedadcError(f"{run.path} has no {x} in round {record['round']}{axis.hint}.")
        total = sum(values) + (total if axis.per_round else 0.0)
        progress[record["round"]] = total
    return progress


def final(run: RecordedRun, metric: str) -> float:
    """The final value of a run: the mean over the evaluated ones of its last 10 rounds."""
    points = curve(run, metric)
    return statistics.mean(v for t, v in points if t > points[-1][0] - LAST)


def _first_round(run: RecordedRun, metric: str, target: float) -> int | None:
    """The first round that reached the target; None if no round did."""
    sign = 1 if higher_is_better(metric) else -1
    return next((t for t, v in curve(run, metric) if sign * v >= sign * target), None)


def _near(best: float, higher: bool) -> float:
    """A target for all runs: a tenth worse than the best, to two decimals, or two digits where that is finer."""
    finer = 10.0 ** max(0, -1 - math.floor(math.log10(abs(best)))) if best else 1.0
    tenths = 90 if higher == (best > 0) else 110  # a tenth below a negative cosine is further from zero
    return (math.floor if higher else math.ceil)(tenths * best * finer) / (100 * finer)


def _per_client(runs: Sequence[RecordedRun], key: str) -> int:
    total = sum(int(r.get(key) or 0) for run in runs for r in run.records)
    return round(total / max(1, sum(len(r.get("cohort") or ()) for run in runs for r in run.records)))


def table_rows(rows: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the comparison table."""
    metric = rows[0].metric
    title = metric.removeprefix("test_").replace("_", " ")
    scale, unit, digits = (100, " %", 1) if is_share(metric) else (1, "", 4)
    axis, (unit_of_x, size) = AXES[rows[0].x], unit_of(rows[0].x, [row.x_to_target or 0.0 for row in rows])
    measure = axis.label if unit_of_x else f"{axis.label}s".replace("ss", "s")
    to_target = f"{measure} to {rows[0].target:g}" + (f" ({unit_of_x})" if unit_of_x else "")
    headings = ["run", "seeds", title, to_target, "up", "down"]
    cells = []
    for row in rows:
        value = short_number(scale * row.value, digits)
        std = f" ± {short_number(scale * row.std, digits)}" if row.std is not None else ""
        progress = "–" if row.x_to_target is None else _digits(row.x_to_target / size, 0 if row.x == "round" else 3)
        if 0 < row.reached < row.seeds:
            progress += f" ({row.reached} of {row.seeds})"
        cells.append(
            [row.label, str(row.seeds), f"{value}{std}{unit}", progress,
             human_bytes(row.bytes_up), human_bytes(row.bytes_down)]
        )  # fmt: skip
    return headings, cells


def _digits(value: float, significant: int) -> str:
    """The value with at least so many significant digits; 0: as a whole number."""
    decimals = max(0, significant - 1 - math.floor(math.log10(value))) if significant and value > 0 else 0
    return f"{value:.{decimals}f}"


def unit_of(x: str, values: Sequence[float]) -> tuple[str, float]:
    """The name and size of the largest unit in which the largest value is at least 1."""
    units = AXES[x].units or (("", 1.0),)
    return next((u for u in reversed(units) if max(values) >= u[1]), units[0])


def is_share(metric: str) -> bool:
    """True if the metric is a share between 0 and 1, which is shown in percent."""
    return metric.endswith(("accuracy", "top5", "macro_f1", *fairness_metrics(Classification)))


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""
