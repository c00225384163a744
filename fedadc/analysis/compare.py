"""Runs compared: mean ± std over seeds, what it took to a target, bytes; as a table and JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedadc.errors import FedadcError, require, unknown
from fedadc.methods import PAIRS
from fedadc.runs.record import RecordedRun

LAST = 10  # rounds; the mean over those of them that were evaluated is a run's final value
SEEDS = {("seed",), ("data", "seed"), ("model", "seed")}
NO_PART = ("storage", "checkpoint")  # keys that take no part in a result
NAMES = {("method", "name"), ("objective", "name")}  # what a label starts with


@dataclass(frozen=True)
class Axis:
    """What a run's progress can be measured by."""

    label: str
    keys: tuple[str, ...]  # of a record
    adds_up: bool  # from round to round
    units: tuple[tuple[str, float], ...] = ()  # and how large they are, the smallest first
    missing: str = ""  # why a run may not have it


BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
TIME = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86400.0))
AXES = {
    "round": Axis("round", ("round",), False),
    "bytes": Axis("bytes up and down", ("bytes_up", "bytes_down"), True, BYTES),
    "bytes_up": Axis("bytes up", ("bytes_up",), True, BYTES),
    "bytes_down": Axis("bytes down", ("bytes_down",), True, BYTES),
    "virtual_seconds": Axis("virtual time", ("virtual_seconds",), False, TIME, "; give it a clock"),
    "seconds": Axis("time", ("seconds",), True, TIME),
    "samples": Axis("samples", ("samples",), True, (("", 1.0), ("thousand", 1e3), ("million", 1e6))),
}


@dataclass(frozen=True)
class Summary:
    """One row: the runs of one setting over its seeds."""

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
    x: str = "round"  # by what progress is measured, and the mean of it at the target over the seeds that reached it
    x_to_target: float | None = None


def summarize(
    runs: Sequence[RecordedRun], target: float | None = None, metric: str = "test_accuracy", x: str = "round"
) -> list[Summary]:
    """A row per setting, in the order in which settings first appear."""
    require(bool(runs), "there is no run to compare.")
    groups, better = group(runs), max if higher_is_better(metric) else min
    finals = {label: [final(r, metric) for r in members] for label, members in groups.items()}
    require(
        target is None or not is_share(metric) or 0 < target <= 1, f"--target is a share such as 0.9, not {target}."
    )
    if target is None:
        best = better(statistics.mean(f) for f in finals.values())
        target = math.floor(90 * best) / 100 if higher_is_better(metric) else math.ceil(110 * best) / 100
    places = {label: [positions(r, x) for r in members] for label, members in groups.items()}
    rows = []
    for label, members in groups.items():
        first = [(where, _first(r, metric, target)) for r, where in zip(members, places[label], strict=True)]
        at = [where[t] for where, t in first if t is not None]
        reached = [t for _, t in first if t is not None]
        rows.append(
            Summary(
                label=label,
                seeds=len(members),
                metric=metric,
                value=statistics.mean(finals[label]),
                std=statistics.stdev(finals[label]) if len(members) > 1 else None,
                best=statistics.mean(better(v for _, v in curve(r, metric)) for r in members),
                target=target,
                rounds_to_target=statistics.mean(reached) if reached else None,
                reached=len(reached),
                bytes_up=_per_client(members, "bytes_up"),
                bytes_down=_per_client(members, "bytes_down"),
                x=x,
                x_to_target=statistics.mean(at) if at else None,
            )
        )
    return rows


def group(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Runs that differ in nothing but seeds, under a label that says how the groups differ."""
    flat = [{k: v for k, v in _flatten(r.tree).items() if k not in SEEDS and k[0] not in NO_PART} for r in runs]
    keys = dict.fromkeys(k for tree in flat for k in tree)
    first: dict[str, dict[tuple[str, ...], Any]] = {}
    groups: dict[str, list[RecordedRun]] = {}
    for r, tree in zip(runs, flat, strict=True):
        label = str(tree.get(("label",)) or _label(tree, flat))
        known = first.setdefault(label, tree)
        different = [".".join(k) for k in keys if _text(known, k) != _text(tree, k)]
        require(
            not different,
            f"{r.path} and {groups.get(label, [r])[0].path} are both labeled {label!r} but differ in "
            f"{', '.join(different[:3])}.",
        )
        twin = next((o for o in groups.get(label, []) if _seeds(o.tree) == _seeds(r.tree)), None)
        require(twin is None, f"{r.path} and {twin.path if twin else ''} are the same run: same settings, same seed.")
        groups.setdefault(label, []).append(r)
    return groups


def _seeds(tree: dict[str, Any]) -> list[Any]:
    flat = _flatten(tree)
    return [flat.get(key) for key in sorted(SEEDS)]


def _text(tree: dict[tuple[str, ...], Any], key: tuple[str, ...]) -> str:
    return json.dumps(tree[key], default=str) if key in tree else "absent"


def _label(tree: dict[tuple[str, ...], Any], others: Sequence[dict[tuple[str, ...], Any]]) -> str:
    """The method's name, and the settings in which it differs from runs that could be taken for it."""
    method, objective = (str(tree.get((node, "name"))) for node in ("method", "objective"))
    pairs = {pair: name for name, pair in PAIRS.items()}
    plain = method if objective in ("cross_entropy", "None") else f"{method} {objective}"
    told = []
    for key in tree:
        if key == ("label",) or key in NAMES:
            continue
        node = (key[0], "name")  # settings of another method are no difference to tell
        peers = [t for t in others if node not in NAMES or t.get(node) == tree.get(node)]
        values = [_text(t, key) for t in peers]
        count, most = values.count(_text(tree, key)), max(map(values.count, values))
        # The value of more than half of the runs goes without saying, and so does "none" where the others speak.
        if len(set(values)) > 1 and ((2 * most <= len(values) and tree[key] is not None) or count < most):
            told.append(f"{_short(key)}={'none' if tree[key] is None else tree[key]}")
    return " ".join([pairs.get((method, objective), plain), *told])


def _short(key: tuple[str, ...]) -> str:
    parts = key[:-1] if key[-1] == "name" else key
    return ".".join(parts[1:] if parts[0] in ("method", "objective", "model", "local") else parts)


def _flatten(tree: Any, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(tree, dict):
        return {at: tree}
    return {k: v for key, value in tree.items() for k, v in _flatten(value, (*at, str(key))).items()}


def curve(run: RecordedRun, metric: str) -> list[tuple[int, float]]:
    """(round, value) wherever the metric was evaluated."""
    points = [(r["round"], float(r[metric])) for r in run.records if isinstance(r.get(metric), int | float)]
    if not points:
        numbers = sorted({k for r in run.records for k, v in r.items() if isinstance(v, float)})
        raise FedadcError(f"{run.path} has no {metric} in any round; it has {', '.join(numbers)}.")
    return points


def positions(run: RecordedRun, x: str) -> dict[int, float]:
    """Where each round of a run lies on an axis."""
    if x not in AXES:
        raise unknown("--x", x, AXES)
    axis, found, so_far = AXES[x], {}, 0.0
    for record in run.records:
        values = [v for key in axis.keys if isinstance(v := record.get(key), int | float) and math.isfinite(v)]
        if len(values) < len(axis.keys):
            raise FedadcError(f"{run.path} has no {x} in round {record['round']}{axis.missing}.")
        so_far = sum(values) + (so_far if axis.adds_up else 0.0)
        found[record["round"]] = so_far
    return found


def final(run: RecordedRun, metric: str) -> float:
    """A run's value: the mean over those of its last rounds that were evaluated."""
    points = curve(run, metric)
    return statistics.mean(v for t, v in points if t > points[-1][0] - LAST)


def _first(run: RecordedRun, metric: str, target: float) -> int | None:
    sign = 1 if higher_is_better(metric) else -1
    return next((t for t, v in curve(run, metric) if sign * v >= sign * target), None)


def higher_is_better(metric: str) -> bool:
    return not metric.endswith("loss")


def _per_client(runs: Sequence[RecordedRun], key: str) -> int:
    total = sum(int(r.get(key) or 0) for run in runs for r in run.records)
    return round(total / max(1, sum(len(r.get("cohort") or ()) for run in runs for r in run.records)))


def as_json(rows: Sequence[Summary]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2)


def table_rows(rows: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the comparison table."""
    metric = rows[0].metric
    shown = metric.removeprefix("test_").replace("_", " ")
    scale, unit, digits = (100, " %", 1) if is_share(metric) else (1, "", 4)
    axis, (unit_of_x, size) = AXES[rows[0].x], unit_of(rows[0].x, [row.x_to_target or 0.0 for row in rows])
    by = f"{unit_of_x} of {axis.label}" if unit_of_x else f"{axis.label}s".replace("ss", "s")
    headings = ["run", "seeds", shown, f"{by} to {rows[0].target:g}", "up", "down"]
    cells = []
    for row in rows:
        std = f" ± {scale * row.std:.{digits}f}" if row.std is not None else ""
        rounds = "–" if row.x_to_target is None else _figures(row.x_to_target / size, 0 if row.x == "round" else 3)
        if 0 < row.reached < row.seeds:
            rounds += f" ({row.reached} of {row.seeds})"
        cells.append(
            [row.label, str(row.seeds), f"{scale * row.value:.{digits}f}{std}{unit}", rounds,
             human_bytes(row.bytes_up), human_bytes(row.bytes_down)]
        )  # fmt: skip
    return headings, cells


def _figures(value: float, figures: int) -> str:
    """So many of them at least; 0: whole numbers."""
    digits = max(0, figures - 1 - math.floor(math.log10(value))) if figures and value > 0 else 0
    return f"{value:.{digits}f}"


def unit_of(x: str, values: Sequence[float]) -> tuple[str, float]:
    """The largest unit in which the largest value is not below 1."""
    units = AXES[x].units or (("", 1.0),)
    return next((u for u in reversed(units) if max(values) >= u[1]), units[0])


def is_share(metric: str) -> bool:
    """Shown in percent."""
    return metric.endswith(("accuracy", "top5", "macro_f1"))


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""
