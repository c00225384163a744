"""Optuna's samplers, pruners and importances: answers depend on the trials alone, and are those of a live study."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from fedadc.errors import FedadcError
from fedadc.studies.search import FACTOR, STUDY, importance, pruned_at, require_optuna, suggest
from fedadc.studies.space import Dimension, read_space
from fedadc.studies.trial_file import SweepTrial, read_trials, write_trials

SPACE = read_space({"lr": "0.001..1,log", "steps": "1..16,int", "beta": "0..1", "kind": ["a", None, [8, 8], {"x": 1}]})
RUNGS = [1, 3, 9]
ROUNDS = 27


def finished(point: dict[str, Any], number: int, score: float) -> SweepTrial:
    return SweepTrial(trial=number, settings=point, state="finished", score=score)


def searched(
    score: Callable[[dict[str, Any]], float | None], sampler: str, trials: int, batch: int = 4, seed: int = 0
) -> list[SweepTrial]:
    """A whole search without training: the score of a point is known; None: it diverges."""
    done: list[SweepTrial] = []
    while len(done) < trials:
        for point in suggest(SPACE, done, batch, sampler, seed, maximize=True):
            value = score(point)
            ended = finished(point, len(done), value or 0.0)
            done = [*done, ended if value is not None else replace(ended, state="diverged", score=None)]
    return done


def peak(point: dict[str, Any]) -> float:
    """Best at lr = 0.1 and beta = 0.5."""
    return 1 - abs(math.log10(point["lr"]) + 1) - abs(point["beta"] - 0.5)


def test_suggestions_lie_in_the_space_with_their_types() -> None:
    trials = searched(peak, "random", 60)
    for key, kind in (("lr", float), ("steps", int), ("beta", float)):
        assert {type(t.settings[key]) for t in trials} == {kind}
    assert {t.settings["steps"] for t in trials} == set(range(1, 17))
    logs = [math.log10(t.settings["lr"]) for t in trials]
    assert all(-3 <= v <= 0 for v in logs) and 10 <= sum(v < -1.5 for v in logs) <= 50  # uniform in the logarithm
    kinds = [t.settings["kind"] for t in trials]
    assert all(kinds.count(kind) >= 5 for kind in ("a", None, [8, 8], {"x": 1}))


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_suggestions_depend_on_the_trials_and_the_seed_alone(sampler: str, tmp_path: Path) -> None:
    trials = searched(peak, sampler, 16)
    assert searched(peak, sampler, 16) == trials
    assert searched(peak, sampler, 16, seed=1) != trials
    write_trials(tmp_path, trials)
    assert read_trials(tmp_path, SPACE) == trials  # a file gives back the very trials
    random.seed(1)
    ahead = suggest(SPACE, trials, 4, sampler, 0, maximize=True)
    first = ahead[:2]
    running = [*trials, *(SweepTrial(trial=16 + i, settings=point) for i, point in enumerate(first))]
    assert first + suggest(SPACE, running, 2, sampler, 0, maximize=True) == ahead  # asked at once, or in two parts


def test_tpe_learns_where_random_does_not() -> None:
    def distance(trials: list[SweepTrial]) -> float:
        late = [abs(math.log10(t.settings["lr"]) + 1) for t in trials[-20:]]
        return sum(late) / len(late)

    assert distance(searched(peak, "tpe", 60)) < 0.5 * distance(searched(peak, "random", 60))


def test_tpe_avoids_where_trials_diverge() -> None:
    def unstable(point: dict[str, Any]) -> float | None:
        return None if point["lr"] > 0.05 else point["lr"]

    late = searched(unstable, "tpe", 60)[-20:]
    assert sum(t.state == "diverged" for t in late) <= 10
    early = searched(unstable, "random", 60)
    assert sum(t.state == "diverged" for t in early) >= 15


def live_study(pruner: str) -> optuna.Study:
    """A study as Optuna's own users have it."""
    chosen: Any = optuna.pruners.MedianPruner()
    if pruner == "hyperband":
        chosen = optuna.pruners.HyperbandPruner(min_resource=RUNGS[0], max_resource=ROUNDS, reduction_factor=FACTOR)
    return optuna.create_study(study_name=STUDY, direction="maximize", pruner=chosen)


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_pruning_is_that_of_a_live_study(pruner: str, tmp_path: Path) -> None:
    """The same reports in the same order to one study that lives, and to one rebuilt from the file every time."""
    live, rng = live_study(pruner), random.Random(3)
    trials: list[SweepTrial] = []
    for batch in range(6):
        points = suggest(SPACE, trials, 5, "random", 0, maximize=True)
        trials += [SweepTrial(trial=5 * batch + i, settings=point) for i, point in enumerate(points)]
        asked = {t.trial: live.ask() for t in trials[-5:]}
        for rung in RUNGS:
            running = [t.trial for t in trials if t.state == "running"]
            values = {number: rng.random() * rung for number in running}
            for number, value in values.items():
                asked[number].report(value, rung)
            dropped = [number for number in running if asked[number].should_prune()]
            for number in dropped:
                live.tell(asked[number], state=TrialState.PRUNED)
            write_trials(tmp_path, trials)
            known = read_trials(tmp_path, SPACE)
            trials = pruned_at(rung, values, SPACE, known, pruner, RUNGS, ROUNDS, maximize=True)
            assert [t.trial for t in trials if t.state == "pruned" and t.trial in running] == dropped
            assert all(t.rungs[str(rung)] == values[t.trial] for t in trials if t.trial in values)
        for index, trial in enumerate(trials):
            if trial.state == "running":
                score = rng.random()
                live.tell(asked[trial.trial], score)
                trials[index] = finished(trial.settings, trial.trial, score)
                trials[index] = replace(trials[index], rungs=trial.rungs, optuna=trial.optuna)
    states = [t.state for t in trials]
    assert 3 <= states.count("pruned") <= 27 and states.count("finished") >= 3


def test_a_low_loss_is_not_pruned_where_low_is_better() -> None:
    done = [replace(finished({"beta": b / 10}, b, b / 10), rungs={"1": b / 10}) for b in range(10)]
    space = read_space({"beta": "0..1"})
    both = [*done, *(SweepTrial(trial=10 + i, settings={"beta": 0.5}) for i in range(2))]
    for maximize, states in ((False, ["running", "pruned"]), (True, ["pruned", "running"])):
        after = pruned_at(1, {10: 0.05, 11: 0.95}, space, both, "median", [1], 5, maximize)
        assert [t.state for t in after[10:]] == states


# --- importance ------------------------------------------------------------------------------------------------------


def of_grid(score: Callable[[int, int], float], size: int = 5) -> tuple[list[Dimension], list[SweepTrial]]:
    space = read_space({"a": list(range(size)), "b": list(range(size)), "fixed": [7]})
    points = [(a, b) for a in range(size) for b in range(size)]
    return space, [finished({"a": a, "b": b, "fixed": 7}, n, score(a, b)) for n, (a, b) in enumerate(points)]


def test_the_key_on_which_the_score_depends_is_important() -> None:
    space, trials = of_grid(lambda a, b: b**2 + 0.01 * a)
    shares, reason = importance(space, trials, 0, maximize=True)
    assert list(shares) == ["b", "a"] and shares["b"] > 0.9 and sum(shares.values()) == pytest.approx(1)
    assert reason == "" and importance(space, trials, 0, maximize=True) == (shares, "")


def test_no_importance_has_its_reason() -> None:
    space, trials = of_grid(lambda a, b: a)
    assert importance(space, trials[:5], 0, True) == ({}, "5 trials are finished, and 6 are needed")
    alike = [replace(t, score=1.0) for t in trials]
    assert importance(space, alike, 0, True) == ({}, "all trials have the same score")
    one = [replace(t, settings={"a": 1}) for t in trials]
    assert importance(read_space({"a": [1, 2], "b": [1]}), one, 0, True) == ({}, "only one key is swept")


# --- Optuna is optional ----------------------------------------------------------------------------------------------


def test_without_optuna_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # it cannot be imported
    with pytest.raises(FedadcError, match=r"need Optuna; install it with `pip install 'fedadc\[sweep\]'`") as caught:
        require_optuna()
    assert caught.value.exit_code == 2
    space, trials = of_grid(lambda a, b: a)
    assert "it needs Optuna and scikit-learn" in importance(space, trials, 0, maximize=True)[1]


def test_help_does_not_import_optuna(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom fedadc.cli.app import main\nsys.argv = ['fedadc', 'sweep', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "import fedadc.studies.sweep\nassert not {'optuna', 'sklearn'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "KEY=VALUES" in done.stdout, done.stderr


def test_searching_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        searched(peak, "tpe", 16)
