"""Covering selection: every cohort covers, and cohorts are uniform among all that do, by rejection and by chains."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedadc.data.dataset import Array
from fedadc.errors import FedadcError
from fedadc.rng import generator
from fedadc.selections import Covering, sampling
from fedadc.selections.reports import KnownLabels, ReportedClasses, ReportedCounts, missing
from fedadc.selections.sampling import BETA_INCREASE, acceptance, by_rejection, cohorts_of, looks, swapped

CROSSED = np.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1]])  # only {0, 1} and {2, 3} cover
UNEQUAL = np.array(  # clients of one class and of many, a class with one holder
    [
        [9, 0, 0, 0, 0],
        [1, 2, 0, 0, 0],
        [0, 1, 3, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
        [1, 1, 1, 1, 0],
        [0, 4, 0, 2, 0],
    ]
)
TWICE = np.array([[1, 0, 3], [1, 2, 0], [0, 1, 1], [2, 1, 1], [0, 3, 0], [1, 1, 1]])
CASES = {"crossed": (CROSSED, 2, 1), "unequal": (UNEQUAL, 3, 1), "twice": (TWICE, 3, 2)}
each_case = pytest.mark.parametrize(("counts", "size", "at_least"), CASES.values(), ids=CASES)


def held(counts: Array, at_least: int = 1) -> KnownLabels:
    return ReportedClasses.of(counts > 0) if at_least == 1 else ReportedCounts.of(counts, at_least)


def all_cohorts(clients: int, size: int) -> list[tuple[int, ...]]:
    return list(combinations(range(clients), size))


def covering(counts: Array, size: int, at_least: int = 1) -> list[tuple[int, ...]]:
    """All covering cohorts, by brute force."""
    return [c for c in all_cohorts(len(counts), size) if (counts[list(c)].sum(axis=0) >= at_least).all()]


def is_uniform(columns: Array, among: list[tuple[int, ...]]) -> bool:
    """Chi-square test that fails for uniform cohorts once in ten thousand runs. Any cohort not in `among` fails."""
    seen = Counter(tuple(sorted(column)) for column in columns.T.tolist())
    return set(seen) <= set(among) and (len(among) == 1 or chisquare([seen[c] for c in among]).pvalue > 1e-4)


def drawn(rule: Covering, counts: Array, size: int, rounds: int) -> Array:
    choose = rule.chooser(len(counts), size, lambda: counts, generator(0, "selection"))
    return np.stack([choose(generator(0, "cohort", t)) for t in range(rounds)], axis=1)


@pytest.mark.parametrize(("clients", "size"), [(5, 1), (6, 2), (6, 5), (7, 4), (4, 4)])
@pytest.mark.parametrize("loop", [sampling.MAX_VECTORIZED, 0])
def test_many_cohorts_at_once_are_each_uniform(
    clients: int, size: int, loop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MAX_VECTORIZED", loop)
    cohorts = cohorts_of(clients, size, 8000, generator(0, "cohort", clients))
    assert is_uniform(cohorts, all_cohorts(clients, size))


@each_case
def test_rejection_is_uniform(counts: Array, size: int, at_least: int) -> None:
    possible = covering(counts, size, at_least)
    assert 1 < len(possible) < len(all_cohorts(len(counts), size))
    rule = Covering(at_least=at_least, looks=0)
    assert is_uniform(drawn(rule, counts, size, 4000), possible)


def test_rejection_is_uniform_when_the_first_rows_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FIRST_DRAWS", 2)
    assert is_uniform(drawn(Covering(looks=0), UNEQUAL, 3, 4000), covering(UNEQUAL, 3))


@each_case
def test_chains_are_uniform(counts: Array, size: int, at_least: int) -> None:
    """The covering states of 8,000 chains are uniform at every look."""
    rule = Covering(at_least=at_least)
    steps, known = rule.steps_of(len(counts), size), held(counts, at_least)
    for cohorts, lacks in looks(known, size, 8_000, steps, rule.beta, 2, generator(0, "cohort")):
        assert (lacks == missing(known.lacking(cohorts))).all()
        assert (lacks == 0).sum() > 1000
        assert is_uniform(cohorts[:, lacks == 0], covering(counts, size, at_least))


def test_cohorts_that_the_chains_choose_are_uniform() -> None:
    assert is_uniform(drawn(Covering(draws=0), CROSSED, 2, 200), covering(CROSSED, 2))
    assert is_uniform(drawn(Covering(draws=0, chains=4), UNEQUAL, 3, 300), covering(UNEQUAL, 3))


def matrix(counts: Array, size: int, at_least: int, beta: float) -> tuple[Array, Array]:
    """The exact transition matrix of the chain, from its own functions, and how many classes each cohort lacks."""
    known, states = held(counts, at_least), all_cohorts(len(counts), size)
    number = {state: i for i, state in enumerate(states)}
    lacks = missing(known.lacking(np.array(states).T))
    moves = np.zeros((len(states), len(states)))
    places, newcomers = (part.ravel() for part in np.meshgrid(np.arange(size), np.arange(len(counts))))
    for i, state in enumerate(states):
        proposed, allowed = swapped(np.tile(np.array(state)[:, None], len(places)), places, newcomers)
        for column in proposed[:, allowed].T.tolist():
            j = number[tuple(sorted(column))]
            moves[i, j] += acceptance(lacks[i], lacks[j], beta) / len(places)
        moves[i, i] += 1 - moves[i].sum()
    return moves, lacks


@each_case
@pytest.mark.parametrize("beta", [0.5, 2.0, 4.0])
def test_the_stationary_law_is_uniform_on_covering_cohorts(
    counts: Array, size: int, at_least: int, beta: float
) -> None:
    moves, lacks = matrix(counts, size, at_least, beta)
    law = np.exp(-beta * lacks) / np.exp(-beta * lacks).sum()
    flow = law[:, None] * moves
    assert moves.min() >= 0 and np.allclose(flow, flow.T, atol=1e-15)  # detailed balance
    assert (
        np.linalg.matrix_power(moves, 10**5) > 0
    ).all()  # every cohort reaches every other, so the stationary law is unique
    assert np.ptp(law[lacks == 0]) == 0


def from_uniform(laws: Array, lacks: Array) -> float:
    """Total variation distance from uniform, given that the cohort covers, for the worst start."""
    given_cover = laws[:, lacks == 0] / laws[:, lacks == 0].sum(axis=1, keepdims=True)
    return float(np.abs(given_cover - 1 / given_cover.shape[1]).sum(axis=1).max() / 2)


@each_case
def test_the_default_steps_forget_the_worst_start(counts: Array, size: int, at_least: int) -> None:
    rule = Covering()
    laws, steps = np.eye(len(all_cohorts(len(counts), size))), rule.steps_of(len(counts), size)
    for look in range(rule.looks):
        moves, lacks = matrix(counts, size, at_least, rule.beta + BETA_INCREASE * look)
        laws = laws @ np.linalg.matrix_power(moves, steps << look)
        assert from_uniform(laws, lacks) < 1e-6


def test_a_chain_within_covering_cohorts_only_would_not_be_uniform() -> None:
    """Such a chain cannot leave its first cohort. The tests above would detect it."""
    moves, lacks = matrix(CROSSED, 2, 1, beta=1e9)  # no class may be lost
    covers = lacks == 0
    assert from_uniform(np.linalg.matrix_power(moves, 10_000)[covers], lacks) == 0.5


def test_the_first_covering_state_of_a_chain_would_not_be_uniform() -> None:
    """Cohorts that are easier to reach would be chosen more often."""
    moves, lacks = matrix(UNEQUAL, 3, 1, beta=2.0)
    moves[lacks == 0] = np.eye(len(lacks))[lacks == 0]
    stopped = np.linalg.matrix_power(moves, 10**5).mean(axis=0, keepdims=True)
    assert from_uniform(stopped, lacks) > 0.02


@given(st.data())
def test_a_chosen_cohort_covers(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    clients, classes = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 2, 5, 64, 65, 130]))
    counts = rng.integers(0, 4, size=(clients, classes)) * (rng.random((clients, classes)) < 0.9)
    size, at_least = data.draw(st.integers(1, clients)), data.draw(st.integers(1, 3))
    rule = Covering(at_least=at_least, draws=data.draw(st.sampled_from([0, 5, 1000])), steps=50, looks=3)
    try:
        cohort = drawn(rule, counts, size, 1)[:, 0]
    except FedadcError:
        return
    assert len(set(cohort.tolist())) == size and (counts[cohort].sum(axis=0) >= at_least).all()


@pytest.mark.parametrize("draws", [0, 3, 1_000_000])
def test_histograms_and_classes_give_the_same_cohorts(draws: int) -> None:
    rules = [Covering(reports=reports, draws=draws) for reports in ("histograms", "classes")]
    some, same = (drawn(rule, UNEQUAL, 3, 30) for rule in rules)
    assert (some == same).all()


def test_with_classes_the_server_keeps_no_count() -> None:
    kept = []
    for counts in (UNEQUAL, 5 * UNEQUAL):
        choose = Covering(reports="classes").chooser(7, 3, lambda counts=counts: counts, generator(0, "selection"))
        kept.append(pickle.dumps(choose))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("draws", [1, 63, 64, 65, 5000])
def test_exactly_the_given_number_of_cohorts_is_drawn(draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def counted(clients: int, size: int, n: int, rng: np.random.Generator) -> Array:
        rows.append(n)
        return cohorts_of(clients, size, n, rng)

    monkeypatch.setattr(sampling, "cohorts_of", counted)
    assert by_rejection(held(np.eye(3, dtype=int)), 2, draws, generator(0, "cohort")) is None
    assert sum(rows) == draws


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"at_least": 2, "reports": "classes"}, "at_least 2 needs reports: histograms"),
        ({"at_least": 0}, "at_least must be in 1"),
        ({"draws": -1}, "draws must be in 0"),
        ({"draws": 0, "looks": 0}, "draws and looks are both 0"),
        ({"chains": 0}, "chains must be in 1"),
        ({"steps": 0}, "steps must be in 1"),
        ({"beta": 0.0}, "beta must be positive"),
        ({"beta": float("nan")}, "beta must be positive"),
        ({"reports": "names"}, "reports must be 'histograms' or 'classes', not"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(FedadcError, match=words):
        Covering(**settings)  # type: ignore[arg-type]


def message(run: Callable[[], object]) -> str:
    with pytest.raises(FedadcError) as error:
        run()
    return str(error.value)


def test_an_impossible_cover_is_refused_at_the_start_with_the_reason() -> None:
    def start(counts: list[list[int]], size: int, at_least: int = 1) -> str:
        return message(lambda: drawn(Covering(at_least=at_least), np.array(counts), size, 0))

    assert start([[1, 0, 2], [1, 0, 0]], 1).startswith(
        "no cohort of 1 clients holds all classes: no client holds class 1;"
    )
    assert "hold at most 2, not 3; use a larger cohort or selection uniform" in start([[1, 0, 2], [0, 1, 0]], 1)
    assert "holds 5 samples of every class: they hold at most 4 samples of class 1, not 5;" in start(
        [[9, 2], [9, 1], [9, 2]], 2, 5
    )
    pairs = [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]  # two of them have room for four classes, but share the first
    assert "holds all classes: a complete search found none;" in start(pairs, 2)


def test_a_cover_that_is_not_found_is_not_called_impossible() -> None:
    rule = Covering(draws=1, looks=1, chains=2, steps=1)
    counts = np.eye(40, dtype=int)[np.arange(80) % 40]  # 2^40 cohorts of 40 cover, of about 10^23
    known_to_exist = message(lambda: drawn(rule, counts, 40, 1))
    assert "found in 3 tries, although one exists; use a larger cohort or selection uniform" in known_to_exist
    unproven = message(lambda: drawn(Covering(at_least=2, draws=2, looks=0), 2 * counts, 40, 1))
    assert "found in 2 tries, which does not prove that none exists" in unproven
