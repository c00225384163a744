"""Figures against their definitions, written down once more by brute force, and against scikit-learn."""

from __future__ import annotations

from decimal import Decimal, localcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from fedadc.errors import FedadcError
from fedadc.evaluation.figures import (
    CLASS_FIGURES,
    Judged,
    brier_score,
    calibration_error,
    most_confused,
    of_classes,
    rates,
)

SCORED = st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=1, max_size=25)  # few scores: many ties


def pairwise(positive: list[bool], scores: list[float]) -> float | None:
    """P(score of a positive > score of a negative) + P(equal) / 2."""
    ups = [s for s, p in zip(scores, positive, strict=True) if p]
    downs = [s for s, p in zip(scores, positive, strict=True) if not p]
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in product(ups, downs)]
    return sum(wins) / len(wins) if wins else None


def stepwise(positive: list[bool], scores: list[float]) -> float | None:
    """The sum over thresholds, from the highest, of (recall - recall before) × precision."""
    total, before, area = sum(positive), 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = [p for p, s in zip(positive, scores, strict=True) if s >= threshold]
        recall = sum(chosen) / total if total else 0.0
        area += (recall - before) * sum(chosen) / len(chosen)
        before = recall
    return area if total else None


def two_classes(positive: Any, scores: Any) -> Judged:
    """Rows of two classes with these log odds."""
    logits = np.stack([np.zeros(len(scores)), np.asarray(scores, dtype=float)], axis=1)
    even, labels = np.full((len(scores), 2), 0.5), np.asarray(positive).astype(np.int64)
    return Judged(labels, logits.argmax(axis=1), even, logits, 1)


def auroc(positive: Any, scores: Any) -> float | None:
    return CLASS_FIGURES["auroc"](two_classes(positive, scores), np.arange(len(scores)))


def average_precision(positive: Any, scores: Any) -> float | None:
    return CLASS_FIGURES["average_precision"](two_classes(positive, scores), np.arange(len(scores)))


@given(SCORED)
def test_areas_are_those_of_their_definitions(rows: list[tuple[bool, int]]) -> None:
    positive, scores = [p for p, _ in rows], [float(s) for _, s in rows]
    found = auroc(np.array(positive), np.array(scores)), average_precision(np.array(positive), np.array(scores))
    for value, expected in zip(found, (pairwise(positive, scores), stepwise(positive, scores)), strict=True):
        assert value is expected if expected is None else value == pytest.approx(expected, rel=1e-13)
    if 0 < sum(positive) < len(rows):
        assert found[0] == pytest.approx(roc_auc_score(positive, scores), rel=1e-12)
        assert found[1] == pytest.approx(average_precision_score(positive, scores), rel=1e-12)


@given(SCORED)
def test_areas_depend_on_the_order_of_scores_alone(rows: list[tuple[bool, int]]) -> None:
    positive, scores = np.array([p for p, _ in rows]), np.array([float(s) for _, s in rows])
    for rising in (np.exp, np.cbrt, lambda s: 7 * s - 3):
        assert auroc(positive, rising(scores)) == auroc(positive, scores)
        assert average_precision(positive, rising(scores)) == average_precision(positive, scores)
    area, flipped, opposite = auroc(positive, scores), auroc(~positive, scores), auroc(positive, -scores)
    if area is None:
        assert flipped is None and opposite is None and len(set(positive.tolist())) == 1
    else:
        assert flipped == pytest.approx(1 - area) and opposite == pytest.approx(1 - area)


def test_areas_by_hand() -> None:
    positive, scores = np.array([1, 0, 1, 0]) == 1, np.array([0.9, 0.8, 0.7, 0.1])
    assert auroc(positive, scores) == 0.75  # of four pairs, one is the wrong way round
    assert average_precision(positive, scores) == pytest.approx(1 / 2 * 1 + 1 / 2 * 2 / 3)
    same = np.zeros(4)
    assert auroc(positive, same) == 0.5 and average_precision(positive, same) == 0.5
    assert average_precision(np.zeros(3, bool), scores[:3]) is None and auroc(np.ones(3, bool), scores[:3]) is None


def test_areas_of_many_rows_are_exact() -> None:
    """A million rows, all scores equal but one: whole numbers, not sums of rounded shares."""
    positive, scores = np.arange(1_000_001) % 2 == 1, np.zeros(1_000_001)
    scores[1] = 1.0
    negatives, positives = 500_001, 500_000
    assert auroc(positive, scores) == (2 * negatives + (positives - 1) * negatives) / (2 * positives * negatives)


def judged(seed: int, n: int, classes: int, positive: int | None = None) -> Judged:
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.full(classes, 0.5), size=n).round(2)  # with ties
    probabilities = (probabilities + 1e-3) / (probabilities + 1e-3).sum(axis=1, keepdims=True)
    labels = rng.integers(classes, size=n)
    return Judged(labels, probabilities.argmax(axis=1), probabilities, np.log(probabilities), positive)


def test_confident_rows_are_ranked_though_their_probabilities_are_all_one() -> None:
    """Log odds 40, 50, 60, 45: softmax in float64 is exactly 1 for each of them."""
    odds, labels = np.array([40.0, 50.0, 60.0, 45.0]), np.array([0, 1, 1, 0])
    assert (1 / (1 + np.exp(-odds)) == 1).all()
    assert auroc(labels, odds) == 1.0 and average_precision(labels, odds) == 1.0
    assert auroc(1 - labels, -odds) == 1.0 and auroc(1 - labels, odds) == 0.0


@given(st.lists(st.lists(st.integers(-300, 300), min_size=4, max_size=4), min_size=1, max_size=8))
def test_scores_are_log_odds_in_any_range(rows: list[list[int]]) -> None:
    """Against decimals of many digits."""
    logits, even = np.array(rows, dtype=float), np.full((len(rows), 4), 0.25)
    scores = Judged(np.zeros(len(rows), dtype=np.int64), logits.argmax(axis=1), even, logits).scores
    with localcontext(prec=60):
        for row, found in zip(rows, scores.tolist(), strict=True):
            for c, score in enumerate(found):
                others = sum((Decimal(v).exp() for k, v in enumerate(row) if k != c), Decimal())
                assert score == pytest.approx(float(Decimal(row[c]) - others.ln()), rel=1e-13, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_means_over_classes_are_those_of_scikit_learn(seed: int) -> None:
    many, rows = judged(seed, 300, 5), np.random.default_rng(seed).integers(300, size=200)
    labels, scores = many.labels[rows], many.scores[rows]
    assert scores == pytest.approx(np.log(many.probabilities[rows] / (1 - many.probabilities[rows])), rel=1e-10)
    every = [roc_auc_score(labels == c, scores[:, c]) for c in range(5)]
    areas = [average_precision_score(labels == c, scores[:, c]) for c in range(5)]
    assert CLASS_FIGURES["auroc"](many, rows) == pytest.approx(np.mean(every), rel=1e-12)
    assert CLASS_FIGURES["average_precision"](many, rows) == pytest.approx(np.mean(areas), rel=1e-12)
    assert [row["auroc"] for row in of_classes(many, rows)] == pytest.approx(every, rel=1e-12)


def test_rates_by_hand() -> None:
    """Of 5 sick, 4 are found; of 15 healthy, 3 are called sick."""
    labels = np.array([1] * 5 + [0] * 15)
    predicted = np.array([1] * 4 + [0] + [1] * 3 + [0] * 12)
    two = Judged(labels, predicted, np.full((20, 2), 0.5), np.zeros((20, 2)), positive=1)
    healthy, sick = rates(two, np.arange(20))
    assert sick == pytest.approx({"precision": 4 / 7, "recall": 0.8, "specificity": 0.8, "f1": 8 / 12, "support": 5})
    assert healthy == pytest.approx(
        {"precision": 12 / 13, "recall": 0.8, "specificity": 0.8, "f1": 24 / 28, "support": 15}
    )
    assert two.confusion(np.arange(20)).tolist() == [[12, 3], [1, 4]]
    assert CLASS_FIGURES["sensitivity"](two, np.arange(20)) == CLASS_FIGURES["specificity"](two, np.arange(20)) == 0.8
    assert most_confused(two.confusion(np.arange(20)), 5) == [(0, 1, 3), (1, 0, 1)]


def test_what_is_not_defined_is_none_not_nan() -> None:
    one = Judged(np.array([0]), np.array([0]), np.array([[0.9, 0.1, 0.0]]), np.array([[5.0, 2.0, -np.inf]]), None)
    first, second, _ = of_classes(one, np.arange(1))
    assert first["recall"] == 1.0 and first["specificity"] is None and first["auroc"] is None
    assert second["recall"] is None and second["precision"] is None and second["f1"] is None
    assert second["specificity"] == 1.0 and second["support"] == 0
    none = np.arange(0)
    assert {name: figure(one, none) for name, figure in CLASS_FIGURES.items()} == dict.fromkeys(CLASS_FIGURES)
    with pytest.raises(FedadcError, match="not finite for 1 of 2 rows, the first of them row 1"):
        Judged(np.array([0, 1]), np.array([0, 0]), np.array([[0.5, 0.5], [np.nan, 0.5]]), np.zeros((2, 2)))


def test_calibration_by_hand() -> None:
    """Ten rows of confidence 0.9 of which 6 are right, ten of 0.6 of which all are: (10 × 0.3 + 10 × 0.4) / 20."""
    labels = np.array([1] * 6 + [0] * 4 + [1] * 10)
    sure, unsure = [[0.1, 0.9]] * 10, [[0.4, 0.6]] * 10
    both = Judged(labels, np.ones(20, dtype=np.int64), np.array(sure + unsure), np.log(sure + unsure), 1)
    assert calibration_error(both, np.arange(20)) == pytest.approx(0.35)
    assert calibration_error(both, np.arange(20), bins=1) == pytest.approx(abs(16 / 20 - 0.75))
    assert brier_score(both, np.arange(20)) == pytest.approx(2 * (6 * 0.01 + 4 * 0.81 + 10 * 0.16) / 20)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(2, 6))
def test_calibration_and_brier_as_they_are_defined(seed: int, n: int, classes: int) -> None:
    found, total, bins = judged(seed, n, classes), 0.0, 15
    confidence = found.probabilities.max(axis=1)
    for i in range(bins):
        inside = [r for r in range(n) if (i == 0 or confidence[r] > i / bins) and confidence[r] <= (i + 1) / bins]
        if inside:
            right = np.mean([found.predicted[r] == found.labels[r] for r in inside])
            total += len(inside) / n * abs(right - np.mean(confidence[inside]))
    assert calibration_error(found, np.arange(n)) == pytest.approx(total, abs=1e-12)
    squares = [sum((found.probabilities[r, c] - (found.labels[r] == c)) ** 2 for c in range(classes)) for r in range(n)]
    assert brier_score(found, np.arange(n)) == pytest.approx(np.mean(squares), rel=1e-12)


def test_figures_do_not_depend_on_the_order_of_rows() -> None:
    many, order = judged(4, 200, 4), np.random.default_rng(1).permutation(200)
    for name, figure in CLASS_FIGURES.items():
        assert figure(many, order) == pytest.approx(figure(many, np.arange(200)), rel=1e-14), name
    found: Any = [of_classes(many, rows) for rows in (order, np.arange(200))]
    assert found[0] == found[1]


def test_two_thousand_classes() -> None:
    many = judged(5, 60, 2000)
    rows = of_classes(many, np.arange(60))
    assert len(rows) == 2000 and sum(row["support"] for row in rows) == 60
    assert 0 <= (CLASS_FIGURES["auroc"](many, np.arange(60)) or -1) <= 1
