"""Verdicts on claims: by paired seeds and an interval, from real run directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedadc.analysis.statistics import Verdict
from fedadc.errors import FedadcError
from fedadc.runs.record import RecordedRun
from fedadc.studies.judge import FEWEST_SEEDS, judge, measure
from fedadc.studies.paper.design import (
    EARLY,
    FINAL,
    GAIN,
    HALFWAY,
    LOST,
    VIRTUAL,
    Claim,
    Statement,
    Term,
    alike,
    higher,
)
from fedadc.studies.paper.designs import DESIGNS
from fedadc.studies.paper.scales import SCALES


def run(values: list[float], path: Path = Path("run"), every: int = 1, **extra: list[float]) -> RecordedRun:
    """A run with this test accuracy in every `every`-th round."""
    records = [
        {"round": every * (i + 1), "test_accuracy": v, **{key: of[i] for key, of in extra.items()}}
        for i, v in enumerate(values)
    ]
    return RecordedRun(path, {"rounds": every * len(values)}, records)


def flat(value: float) -> RecordedRun:
    return run([value] * 3)


def test_measures_are_computed_from_the_records() -> None:
    recorded = run([i / 100 for i in range(1, 41)])  # round t has t %
    assert measure(recorded, FINAL) == pytest.approx(sum(range(31, 41)) / 1000)
    assert measure(recorded, HALFWAY) == pytest.approx(sum(range(11, 21)) / 1000)
    assert measure(run([0.1, 0.9, 0.2]), LOST) == pytest.approx(0.5)
    assert measure(recorded, EARLY) == pytest.approx(sum(range(1, 9)) / 800)
    assert measure(run([0.1, 0.2, 0.3, 0.4], every=10), HALFWAY) == 0.2
    assert measure(run([0.1, 0.2], virtual_seconds=[3.0, 7.5]), VIRTUAL) == 7.5
    assert measure(run([0.1, 0.2], ema_test_accuracy=[0.3, 0.5]), "ema_test_accuracy") == pytest.approx(0.4)
    assert measure(run([0.7], every=3), HALFWAY) == 0.7  # evaluated only at the end


def test_the_gain_of_a_calibration_is_over_all_samples(tmp_path: Path) -> None:
    rows = [{"regularizer": "none", "personal_cumulative": 0.75, "global_cumulative": 0.5}]
    (tmp_path / "personal").mkdir()
    (tmp_path / "personal/summary.json").write_text(json.dumps({"rows": rows}))
    assert measure(run([0.1], tmp_path), GAIN + "none") == 0.25
    with pytest.raises(FedadcError, match="has not been personalized with the regularizer prox"):
        measure(run([0.1], tmp_path), GAIN + "prox")


def results(**values: list[float]) -> dict[tuple[str, str], dict[int, RecordedRun]]:
    return {("p", label): {seed: flat(v) for seed, v in enumerate(of)} for label, of in values.items()}


CLAIM = Claim("A beats B", "here", (higher("p", "A", "B"),))


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ([0.8, 0.6, 0.7, 0.5], [0.7, 0.5, 0.6, 0.4], Verdict.HOLDS),  # pairs: always better, though the ranges overlap
        ([0.7, 0.5, 0.6, 0.4], [0.8, 0.6, 0.7, 0.5], Verdict.DOES_NOT_HOLD),
        ([0.8, 0.6, 0.7, 0.5], [0.7, 0.7, 0.6, 0.4], Verdict.CANNOT_BE_TOLD),
        ([0.8, 0.6, 0.7], [0.1, 0.1, 0.1], Verdict.CANNOT_BE_TOLD),  # three seeds
        ([0.8], [0.1], Verdict.CANNOT_BE_TOLD),
    ],
)
def test_a_claim_is_judged_by_paired_seeds(ours: list[float], theirs: list[float], found: Verdict) -> None:
    judged = judge(CLAIM, results(A=ours, B=theirs), as_published=True)
    assert judged.verdict == found and bool(judged.reason) == (found == Verdict.CANNOT_BE_TOLD)


def test_only_seeds_that_all_rows_have_are_counted() -> None:
    found = results(A=[0.8, 0.6, 0.7, 0.5, 0.9], B=[0.7, 0.5, 0.6, 0.4])
    judged = judge(CLAIM, found, as_published=True)
    assert judged.seeds == 4 and judged.verdict == Verdict.HOLDS
    judged = judge(CLAIM, results(A=[0.8, 0.6, 0.7, 0.5]), as_published=True)
    assert judged.verdict == Verdict.CANNOT_BE_TOLD and judged.statements[0].interval is None
    assert judged.reason == "0 paired seeds, and 4 are needed"
    assert "1 paired seed, and 4" in judge(CLAIM, results(A=[0.8], B=[0.7]), as_published=True).reason


def test_a_run_that_diverged_counts_as_no_accuracy() -> None:
    """Else a method that diverges would only be missing where it is compared."""
    found: Any = results(A=[0.8, 0.6, 0.7, 0.5], B=[0.7, 0.5, 0.6, 0.4])
    found["p", "B"] = dict.fromkeys(range(4))
    judged = judge(CLAIM, found, as_published=True)
    assert judged.verdict == Verdict.HOLDS and judged.statements[0].interval is not None
    assert judged.statements[0].interval.mean == pytest.approx(0.65)
    found["p", "A"] = dict.fromkeys(range(4))
    both_diverged = judge(CLAIM, found, as_published=True)  # which says nothing about their order
    assert both_diverged.seeds == 0 and both_diverged.verdict == Verdict.CANNOT_BE_TOLD
    time = Claim("A is slow", "here", (Statement((Term(1, "p", "B", VIRTUAL),)),))
    assert judge(time, found, True).seeds == 0  # it has no other figures


def test_a_method_that_diverges_does_not_converge() -> None:
    converges = next(claim for claim in DESIGNS["fig5-2"].claims if "converges" in claim.text)
    key = (converges.statements[0].terms[0].panel, "FedADC+")
    assert judge(converges, {key: dict.fromkeys(range(4))}, True).verdict == Verdict.DOES_NOT_HOLD
    steady = {seed: run([0.5, *[0.6] * 12]) for seed in range(4)}
    assert judge(converges, {key: steady}, True).verdict == Verdict.HOLDS
    lost = {seed: run([0.9, *[0.2] * 12]) for seed in range(4)}
    assert judge(converges, {key: lost}, True).verdict == Verdict.DOES_NOT_HOLD


def test_a_claim_of_many_statements_is_not_refuted_by_chance() -> None:
    """An interval of the usual level would refute it; that of a level corrected for ten statements does not."""
    ours = [0.5] * 10
    close = [0.49, 0.54, 0.55, 0.53, 0.52, 0.56, 0.51, 0.54, 0.5, 0.53]
    one = Claim("A beats B", "here", (higher("p", "A", "B"),))
    many = Claim("A beats all", "here", (higher("p", "A", "B"),) * 50)
    found = results(A=ours, B=close)
    assert judge(one, found, True).verdict == Verdict.DOES_NOT_HOLD
    assert judge(many, found, True).verdict == Verdict.CANNOT_BE_TOLD


def test_every_design_has_enough_seeds_for_a_verdict() -> None:
    for design in DESIGNS.values():
        assert all(scale.seeds_of(design) >= FEWEST_SEEDS for scale in SCALES.values()), design.name


def test_a_statement_may_be_relative() -> None:
    runs = {("p", label): {s: run([0.5], virtual_seconds=[t * (s + 1)]) for s in range(4)}
            for label, t in (("A", 11.0), ("B", 10.0))}  # fmt: skip
    terms = (Term(1, "p", "A", VIRTUAL), Term(-1, "p", "B", VIRTUAL))
    claim = Claim("A is 10 % slower", "here", (Statement(terms, 0.05, 0.15, relative_to=Term(1, "p", "B", VIRTUAL)),))
    judged = judge(claim, runs, True)
    assert judged.verdict == Verdict.HOLDS and judged.statements[0].interval is not None
    assert judged.statements[0].interval.mean == pytest.approx(0.1)


def test_all_statements_must_hold() -> None:
    both = Claim("A beats B and C", "here", (higher("p", "A", "B"), higher("p", "A", "C")))
    good, bad, close = [0.9, 0.8, 0.7, 0.6], [0.95, 0.9, 0.8, 0.7], [0.91, 0.75, 0.6, 0.5]
    low = [0.1, 0.1, 0.1, 0.1]
    for other, found in ((low, Verdict.HOLDS), (bad, Verdict.DOES_NOT_HOLD), (close, Verdict.CANNOT_BE_TOLD)):
        assert judge(both, results(A=good, B=low, C=other), True).verdict == found


def test_likeness_needs_the_whole_interval_within_the_margin() -> None:
    claim = Claim("A and B are alike", "here", (alike(("p", "A"), ("p", "B"), 0.01),))
    base = [0.5, 0.6, 0.7, 0.8]
    for shift, found in (
        ((0.001, -0.001, 0.002, 0.0), Verdict.HOLDS),
        ((0.02, 0.03, 0.02, 0.02), Verdict.DOES_NOT_HOLD),
        ((0.001, 0.02, -0.001, 0.0), Verdict.CANNOT_BE_TOLD),
    ):
        ours = [value + s for value, s in zip(base, shift, strict=True)]
        assert judge(claim, results(A=ours, B=base), True).verdict == found


def test_a_claim_about_the_published_setting_is_not_judged_elsewhere() -> None:
    claim = Claim("A passes 80 %", "here", (Statement((Term(1, "p", "A", FINAL),), low=0.8),), only_as_published=True)
    found = results(A=[0.9, 0.9, 0.85, 0.86])
    assert judge(claim, found, as_published=True).verdict == Verdict.HOLDS
    judged = judge(claim, found, as_published=False)
    assert judged.verdict == Verdict.CANNOT_BE_TOLD and "published" in judged.reason
