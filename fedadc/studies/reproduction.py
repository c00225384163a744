"""The result of a reproduction: our figures beside the paper's, verdicts on its claims; as tables, files, a picture."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedadc.analysis.plots import plot_panels
from fedadc.analysis.statistics import Verdict
from fedadc.runs.record import RecordedRun
from fedadc.studies.estimate import Estimate
from fedadc.studies.judge import JudgedClaim, JudgedStatement
from fedadc.studies.paper.design import FINAL, GAIN, VIRTUAL, Statement
from fedadc.studies.plan import Key, ReproductionPlan, Setting
from fedadc.studies.queue import Outcome
from fedadc.system.files import write_text
from fedadc.system.version import __version__

RULE = (
    "Verdicts: the 95 % bootstrap interval over paired seeds lies within the claim's bounds (holds), outside (does not "
    "hold), or neither (cannot be told). With 4 seeds it covers 87 %, with 5 93 %. A claim of several statements holds "
    "if all do, and the one nearest to failing is shown."
)
Table = tuple[list[str], list[list[str]]]  # headings and rows of cells


@dataclass(frozen=True)
class PlannedCost:
    """Runs of one row that are to be trained, and what each of them costs."""

    panel: str
    label: str
    tuning: bool  # to choose a setting
    runs: int
    each: Estimate
    fit: int  # of these runs, in the budget


@dataclass(frozen=True)
class ReproducedRow:
    """Our figures for one row, beside the paper's."""

    panel: str
    label: str
    setting: Setting  # chosen from its grid
    tried: int  # settings
    edges: Sequence[str]  # sentences on chosen values that stand at the edge of the grid
    planned: int  # seeds
    values: Mapping[str, Mapping[int, float]]  # measure -> seed -> figure of a finished run
    reported: tuple[float, float] | None  # the paper's mean and std, in percent
    diverged: int = 0  # seeds
    failed: int = 0  # seeds
    failed_in_tuning: int = 0  # runs

    @property
    def missing(self) -> int:
        """The seeds that were not run."""
        return self.planned - len(self.values[FINAL]) - self.diverged - self.failed

    @property
    def problem(self) -> str:
        """What happened to the seeds that are not in the figures."""
        counts = {
            "diverged": self.diverged,
            "failed": self.failed,
            "not run": self.missing,
            "failed in tuning": self.failed_in_tuning,
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def mean(self, name: str) -> float | None:
        found = list(self.values[name].values())
        return statistics.mean(found) if found else None

    def std(self, name: str) -> float | None:
        found = list(self.values[name].values())
        return statistics.stdev(found) if len(found) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        figures = {
            name: {"mean": self.mean(name), "std": self.std(name), "seeds": dict(of_seed)}
            for name, of_seed in self.values.items()
        }
        named = {"panel": self.panel, "label": self.label, "setting": self.setting, "edges": list(self.edges)}
        paper = None if self.reported is None else {"mean": self.reported[0], "std": self.reported[1]}
        return {**named, "problem": self.problem, "figures": figures, "paper_percent": paper}


@dataclass(frozen=True)
class Reproduction:
    """What `reproduce` returns. The folder `out` has the runs, a picture, the tables, and all figures as JSON."""

    plan: ReproductionPlan
    rows: list[ReproducedRow]
    claims: list[JudgedClaim]
    scores: Mapping[Key, Sequence[tuple[Setting, float | None]]]  # of every setting that was tried; None: diverged
    failed: list[Outcome]
    estimated_seconds: float  # of the runs that were trained now
    seconds: float  # that they took
    out: Path

    def __repr__(self) -> str:
        judged = "\n".join(f"  {claim.verdict}: {claim.claim.text}" for claim in self.claims)
        return f"Reproduction({self.plan.design.name}, scale {self.plan.scale.name}, {self.out}):\n{judged}"

    def file(self, suffix: str) -> Path:
        """The path of the picture (png), of the tables (md) or of all figures (json)."""
        return self.out / f"{self.plan.file_stem}.{suffix}"

    def tables(self) -> Iterator[tuple[str, Table]]:
        """Title and content of the table of every panel."""
        for panel in self.plan.design.panels:
            rows = [row for row in self.rows if row.panel == panel.name]
            if rows:
                yield self.plan.title(panel), _table(rows, self.plan.design.measures, self.plan.on_papers_data(panel))

    def edges(self) -> list[str]:
        """Sentences on chosen values that stand at the edge of their grids."""
        return [f"{row.label}, {row.panel}: {sentence}" for row in self.rows for sentence in row.edges]

    def claims_table(self) -> Table:
        headings = ["claim", "paper", "ours", "verdict"]
        return headings, [[c.claim.text, c.claim.reported or "–", _ours(c), _verdict(c)] for c in self.claims]


def _table(rows: Sequence[ReproducedRow], measures: Sequence[str], same_data: bool) -> Table:
    """A line per method. The difference from the paper is shown only where the data is the paper's."""
    compared, searched = any(row.reported for row in rows), any(row.setting for row in rows)
    headings = ["method", "seeds", *map(_heading, measures)]
    headings += (["paper", "difference"] if same_data else ["paper, other data"]) if compared else []
    cells = []
    for row in rows:
        seeds = f"{len(row.values[FINAL])}" + (f" ({row.problem})" if row.problem else "")
        line = [row.label, seeds, *(_figure(row, name) for name in measures)]
        if compared:
            line += [_reported(row), *([_difference(row)] if same_data else [])]
        if searched:
            chosen = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in row.setting.items())
            line.append(f"{chosen} (of {row.tried})" if chosen else "–")
        cells.append(line)
    return headings + (["chosen"] if searched else []), cells


def _heading(name: str) -> str:
    if name.startswith(GAIN):
        return f"gain ({name.removeprefix(GAIN)})"
    return {FINAL: "accuracy %", VIRTUAL: "virtual s"}.get(name, name.removesuffix("_test_accuracy"))


def _figure(row: ReproducedRow, name: str) -> str:
    mean, std = row.mean(name), row.std(name)
    if mean is None:
        return "–"
    scale, sign = (1 if name == VIRTUAL else 100), "+" if name.startswith(GAIN) else ""
    return f"{scale * mean:{sign}.1f}" + (f" ± {scale * std:.1f}" if std is not None else "")


def _reported(row: ReproducedRow) -> str:
    return "–" if row.reported is None else f"{row.reported[0]:g} ± {row.reported[1]:g}"


def _difference(row: ReproducedRow) -> str:
    mean = row.mean(FINAL)
    return "–" if mean is None or row.reported is None else f"{100 * mean - row.reported[0]:+.1f}"


def _ours(judged: JudgedClaim) -> str:
    """The interval of a claim's statement; of several, that of the one that is nearest to being false."""
    known = [one for one in judged.statements if one.interval is not None]
    if not known:
        return "not run"
    shown = min(known, key=_slack)
    assert shown.interval is not None
    low, mean, high = (100 * value for value in (shown.interval.low, shown.interval.mean, shown.interval.high))
    several = f"{described(shown.statement)}: " if len(known) > 1 else ""
    bounds = f" [{low:+.1f}, {high:+.1f}]" if math.isfinite(low) else ""
    return f"{several}{mean:+.1f}{bounds}{' %' if shown.statement.relative_to else ''}"


def described(statement: Statement) -> str:
    """The terms of a statement in short; the panels are named if there are several."""
    several = len({term.panel for term in statement.terms}) > 1
    texts = []
    for term in statement.terms:
        name = term.label + (f" {term.panel}" if several else "")
        texts.append(f"{'-' if term.factor < 0 else '+'} {name}")
    return " ".join(texts).removeprefix("+ ")


def _slack(judged: JudgedStatement) -> tuple[int, float]:
    """First those that do not hold, then those that cannot be told; among equals the one nearest to its bound."""
    assert judged.interval is not None
    order = [Verdict.DOES_NOT_HOLD, Verdict.CANNOT_BE_TOLD, Verdict.HOLDS]
    statement, interval = judged.statement, judged.interval
    return order.index(judged.verdict), min(interval.low - statement.low, statement.high - interval.high)


def _verdict(judged: JudgedClaim) -> str:
    return f"{judged.verdict}: {judged.reason}" if judged.reason else str(judged.verdict)


def write_reproduction(result: Reproduction, runs: Mapping[Key, Mapping[int, RecordedRun | None]]) -> None:
    """Write the figures as JSON, the tables as Markdown, and the picture."""
    write_text(result.file("json"), json.dumps(_as_dict(result), indent=1, ensure_ascii=False) + "\n")
    write_text(result.file("md"), as_markdown(result))
    design = result.plan.design
    drawn = {
        result.plan.title(panel): [
            run for row in panel.rows for run in runs.get((panel.name, row.label), {}).values() if run is not None
        ]
        for panel in design.panels
    }
    drawn = {title: found for title, found in drawn.items() if found}
    if drawn:
        metrics = [name for name in design.measures if name.endswith("_test_accuracy")]
        title = f"{design.title} ({result.plan.scale.name} scale)"
        plot_panels(drawn, result.file("png"), ["test_accuracy", *metrics], design.x, title)


def _as_dict(result: Reproduction) -> dict[str, Any]:
    plan, design = result.plan, result.plan.design
    return {
        "name": design.name,
        "title": design.title,
        "scale": plan.scale.name,
        "version": __version__,
        "seeds": list(plan.seeds),
        "changes": plan.changes(),
        "rows": [row.as_dict() for row in result.rows],
        "claims": [_claim_dict(judged) for judged in result.claims],
        "scores": [
            {"panel": panel, "label": label, "settings": [{"setting": s, "validation_accuracy": v} for s, v in tried]}
            for (panel, label), tried in result.scores.items()
        ],
        "failed": {str(outcome.job.path): outcome.message for outcome in result.failed},
        "estimated_seconds": result.estimated_seconds,
        "seconds": result.seconds,
    }


def _claim_dict(judged: JudgedClaim) -> dict[str, Any]:
    def bound(value: float) -> float | None:
        return value if math.isfinite(value) else None

    statements = [
        {
            "terms": [vars(term) for term in one.statement.terms],
            "bounds": [bound(one.statement.low), bound(one.statement.high)],
            "interval": one.interval and {"mean": one.interval.mean, "low": bound(one.interval.low),
                                          "high": bound(one.interval.high), "seeds": one.interval.n},
            "verdict": one.verdict,
        }
        for one in judged.statements
    ]  # fmt: skip
    claim = judged.claim
    named = {"claim": claim.text, "source": claim.source, "paper": claim.reported, "verdict": judged.verdict}
    return {**named, "reason": judged.reason, "statements": statements}


def as_markdown(result: Reproduction) -> str:
    plan, design = result.plan, result.plan.design
    lines = [f"# {design.title}", "", f"Scale {plan.scale.name}: {plan.scale.summary}.", ""]
    lines += [f"- {change}" for change in plan.changes()] + [""]
    for title, table in result.tables():
        lines += [f"## {title}", "", *_markdown(table), ""]
    lines += [f"- {sentence}" for sentence in result.edges()] + [""]
    lines += ["## Claims", "", *_markdown(result.claims_table()), "", RULE, ""]
    return "\n".join(lines)


def _markdown(table: Table) -> list[str]:
    headings, cells = table
    rows = [headings, ["---"] * len(headings), *cells]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
