"""Judge the paper's claims by runs: figures seed by seed, an interval over seeds, a verdict by a fixed rule.

A statement of a claim is a sum of figures of several rows, such as the accuracy of one method minus that of another.
It is computed for every seed that all these rows have, because runs with the same seed share data, clients and initial
weights. A run that diverged counts as an accuracy of 0; a seed with which all rows of a comparison diverged does not
count. The 95 % bootstrap interval of its mean over seeds decides: the statement holds if the interval lies within the
statement's bounds, does not hold if it lies outside, and else cannot be told. It cannot be told from fewer than four
seeds either. A claim holds if all its statements hold, and does not hold if one of them does not hold; because the more
statements there are, the more likely one fails by chance, an interval at 1 - 5 % / statements must lie outside too.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedadc.analysis.compare import LAST, curve, final, positions
from fedadc.analysis.statistics import Interval, Verdict, all_of, bootstrap_interval, verdict
from fedadc.errors import FedadcError
from fedadc.runs.layout import PERSONAL, PERSONAL_SUMMARY
from fedadc.runs.record import RecordedRun
from fedadc.studies.paper.design import EARLY, FINAL, GAIN, HALFWAY, LOST, VIRTUAL, Claim, Statement, Term

ACCURACY = "test_accuracy"
FEWEST_SEEDS = 4
ERROR = 0.05  # 1 - confidence of an interval
PARTS = {HALFWAY: 2, EARLY: 5}  # of all rounds, one of so many
Results = Mapping[tuple[str, str], Mapping[int, RecordedRun | None]]  # (panel, label) -> seed -> run; None: it diverged


@dataclass(frozen=True)
class JudgedStatement:
    statement: Statement
    interval: Interval | None  # None: no seed has all rows
    verdict: Verdict


@dataclass(frozen=True)
class JudgedClaim:
    """A claim of the paper, and what our runs say about it."""

    claim: Claim
    statements: tuple[JudgedStatement, ...]
    verdict: Verdict
    reason: str = ""  # why it cannot be told

    @property
    def seeds(self) -> int:
        """The number of seeds behind the statement that has the fewest."""
        return min(judged.interval.n if judged.interval else 0 for judged in self.statements)


def judge(claim: Claim, results: Results, as_published: bool) -> JudgedClaim:
    """The verdict on a claim."""
    judged = tuple(_judged(statement, results, len(claim.statements)) for statement in claim.statements)
    if claim.only_as_published and not as_published:
        return JudgedClaim(claim, judged, Verdict.CANNOT_BE_TOLD, "it is about the published setting only")
    found = JudgedClaim(claim, judged, all_of([one.verdict for one in judged]))
    if found.verdict != Verdict.CANNOT_BE_TOLD:
        return found
    few = f"{found.seeds} paired seed{'s' * (found.seeds != 1)}, and {FEWEST_SEEDS} are needed"
    reason = few if found.seeds < FEWEST_SEEDS else "an interval includes its bound"
    return JudgedClaim(claim, judged, found.verdict, reason)


def _judged(statement: Statement, results: Results, among: int) -> JudgedStatement:
    """The verdict on a statement of a claim that has so many."""
    terms = [(term, _figures(term, results)) for term in statement.terms]
    divisor = None if statement.relative_to is None else _figures(statement.relative_to, results)
    common = [set(of_seed) for _, of_seed in terms] + ([] if divisor is None else [set(divisor)])
    seeds = [seed for seed in sorted(set.intersection(*common)) if not _all_diverged(statement, results, seed)]
    if not seeds:
        return JudgedStatement(statement, None, Verdict.CANNOT_BE_TOLD)
    sums = [math.fsum(term.factor * of_seed[seed] for term, of_seed in terms) for seed in seeds]
    if divisor is not None:
        sums = [value / divisor[seed] for value, seed in zip(sums, seeds, strict=True)]
    interval = bootstrap_interval(sums, 1 - ERROR)
    found = verdict(interval, statement.low, statement.high, FEWEST_SEEDS)
    if found == Verdict.DOES_NOT_HOLD:
        wider = bootstrap_interval(sums, 1 - ERROR / among)
        found = verdict(wider, statement.low, statement.high, FEWEST_SEEDS)
    return JudgedStatement(statement, interval, found)


def _all_diverged(statement: Statement, results: Results, seed: int) -> bool:
    """Whether all rows of a comparison diverged with a seed, which then says nothing about their order."""
    runs = [results[term.panel, term.label][seed] for term in statement.terms]
    return len(runs) > 1 and all(run is None for run in runs)


def _figures(term: Term, results: Results) -> dict[int, float]:
    """The figure of a term for every seed; a run that diverged has only those of `_if_diverged`."""
    runs = results.get((term.panel, term.label), {})
    figures = {s: _if_diverged(term.measure) if run is None else measure(run, term.measure) for s, run in runs.items()}
    return {seed: value for seed, value in figures.items() if value is not None}


def _if_diverged(name: str) -> float | None:
    """The figure of a run that diverged: an accuracy of 0, and all accuracy lost; None for other figures."""
    if name == VIRTUAL or name.startswith(GAIN):
        return None
    return 1.0 if name == LOST else 0.0


def measure(run: RecordedRun, name: str) -> float:
    """A figure of a finished run. The names are in `paper/design.py`; others are metrics, as `final` takes them."""
    if name == LOST:
        return max(value for _, value in curve(run, ACCURACY)) - final(run, ACCURACY)
    if name in PARTS:
        return _accuracy_at(run, run.tree["rounds"] // PARTS[name])
    if name == VIRTUAL:
        return max(positions(run, "virtual_seconds").values())
    if name.startswith(GAIN):
        return _gain(run.path, name.removeprefix(GAIN))
    return final(run, ACCURACY if name == FINAL else name)


def _accuracy_at(run: RecordedRun, round: int) -> float:
    """The accuracy at a round: the mean over the evaluated ones of the ten rounds up to there."""
    points = curve(run, ACCURACY)
    last = max((t for t, _ in points if t <= round), default=points[0][0])
    return statistics.mean(value for t, value in points if last - LAST < t <= last)


def _gain(run: Path, regularizer: str) -> float:
    """The accuracy that the clients' own models gain over the global one, over all test samples of all clients."""
    rows = personal_rows(run)
    if regularizer not in rows:
        raise FedadcError(f"{run} has not been personalized with the regularizer {regularizer}.")
    return rows[regularizer]["personal_cumulative"] - rows[regularizer]["global_cumulative"]


def personal_rows(run: Path) -> dict[str, dict[str, float]]:
    """The figures of a run's calibration by regularizer; {} if there was none."""
    file = run / PERSONAL / PERSONAL_SUMMARY
    if not file.is_file():
        return {}
    return {row["regularizer"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}
