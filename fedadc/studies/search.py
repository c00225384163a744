"""Optuna's samplers, pruners and importances, as functions of the trials so far.

Every call builds a new study in memory from the trials, in their order, so an answer depends on nothing else: not on
which process asks, on when, or on what was asked before. Random numbers come from (seed, number of the trial).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedadc.errors import FedadcError
from fedadc.rng import generator
from fedadc.studies.space import Dimension, Point, ValueList
from fedadc.studies.trial_file import SweepTrial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study

SAMPLERS = ("grid", "random", "tpe")
PRUNERS = ("none", "median", "hyperband")
STUDY = "fedadc"  # Hyperband deals trials to brackets by this name and the number of the trial
FACTOR = 3  # Hyperband keeps one of so many trials at each rung
FEWEST_FOR_IMPORTANCE = 6  # finished trials
EVALUATOR = "fANOVA"


def require_optuna() -> None:
    """Import Optuna; if it is absent, say how to get it."""
    try:
        with _quiet():
            import optuna  # noqa: F401
    except ImportError:
        raise FedadcError(
            "samplers other than grid, and pruners, need Optuna; install it with `pip install 'fedadc[sweep]'`."
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def suggest(
    space: Sequence[Dimension], trials: Sequence[SweepTrial], count: int, sampler: str, seed: int, maximize: bool
) -> list[Point]:
    """The settings of the next trials."""
    from optuna.samplers import RandomSampler, TPESampler

    study, points = _study(space, trials, maximize), []
    distributions = _distributions(space)
    for number in range(len(trials), len(trials) + count):
        drawn = int(generator(seed, "sweep", number).integers(2**32))
        study.sampler = RandomSampler(seed=drawn) if sampler == "random" else TPESampler(seed=drawn)
        asked = study.ask(fixed_distributions=distributions)
        points.append({d.key: d.values[asked.params[d.key]] if isinstance(d, ValueList) else asked.params[d.key]
                       for d in space})  # fmt: skip
    return points


def pruned_at(
    rung: int,
    values: Mapping[int, float],
    space: Sequence[Dimension],
    trials: Sequence[SweepTrial],
    pruner: str,
    rungs: Sequence[int],
    rounds: int,
    maximize: bool,
) -> list[SweepTrial]:
    """The trials after a rung: `values` (number of a trial -> value) are reported, and some of these are pruned."""
    from optuna.pruners import HyperbandPruner, MedianPruner
    from optuna.trial import Trial

    study = _study(space, trials, maximize)
    if pruner == "median":
        study.pruner = MedianPruner()
    else:
        study.pruner = HyperbandPruner(min_resource=rungs[0], max_resource=rounds, reduction_factor=FACTOR)
    asked = {number: Trial(study, study.trials[number]._trial_id) for number in values}
    for number, trial in asked.items():
        trial.report(values[number], rung)
    pruned = {number for number, trial in asked.items() if trial.should_prune()}
    return [
        trial
        if trial.trial not in values
        else replace(
            trial,
            state="pruned" if trial.trial in pruned else trial.state,
            rungs={**trial.rungs, str(rung): values[trial.trial]},
            optuna=dict(study.trials[trial.trial].system_attrs),
        )
        for trial in trials
    ]


def importance(
    space: Sequence[Dimension], trials: Sequence[SweepTrial], seed: int, maximize: bool
) -> tuple[dict[str, float], str]:
    """The share of each key in the variance of the score, most important first, and the reason if it is not known."""
    varied = [d.key for d in space if len(d.ends) > 1]
    scores = [trial.score for trial in trials if trial.state == "finished"]
    if len(varied) < 2:
        return {}, "only one key is swept"
    if len(scores) < FEWEST_FOR_IMPORTANCE:
        return {}, f"{len(scores)} trials are finished, and {FEWEST_FOR_IMPORTANCE} are needed"
    if len(set(scores)) < 2:
        return {}, "all trials have the same score"
    try:
        import sklearn  # noqa: F401, what fANOVA needs

        require_optuna()
    except (ImportError, FedadcError):
        return {}, "it needs Optuna and scikit-learn; install them with `pip install 'fedadc[sweep]'`"
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    drawn = int(generator(seed, "sweep importance").integers(2**32))
    with _quiet():
        study = _study(space, trials, maximize)
        found = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=drawn), params=varied)
    return dict(sorted(found.items(), key=lambda item: (-item[1], varied.index(item[0])))), ""


def _study(space: Sequence[Dimension], trials: Sequence[SweepTrial], maximize: bool) -> Study:
    """A study with these trials. A trial that diverged counts as pruned without any value: worse than all others."""
    import optuna
    from optuna.trial import TrialState, create_trial

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would announce every study
    try:
        study = optuna.create_study(
            study_name=STUDY, direction="maximize" if maximize else "minimize", pruner=optuna.pruners.NopPruner()
        )
    finally:
        optuna.logging.set_verbosity(verbosity)
    states = {"finished": TrialState.COMPLETE, "running": TrialState.RUNNING}
    distributions = _distributions(space)
    for trial in trials:
        reported = {} if trial.state == "diverged" else {int(rung): value for rung, value in trial.rungs.items()}
        study.add_trial(
            create_trial(
                state=states.get(trial.state, TrialState.PRUNED),
                value=trial.score if trial.state == "finished" else None,
                params={d.key: _parameter(d, trial.settings[d.key]) for d in space},
                distributions=distributions,
                intermediate_values=reported,
                system_attrs=trial.optuna,
            )
        )
    return study


def _parameter(dimension: Dimension, value: Any) -> Any:
    """A listed value is known to Optuna by its position, so it may be of any type."""
    return dimension.index(value) if isinstance(dimension, ValueList) else value


def _distributions(space: Sequence[Dimension]) -> dict[str, BaseDistribution]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, BaseDistribution] = {}
    for d in space:
        if isinstance(d, ValueList):
            found[d.key] = CategoricalDistribution(range(len(d.values)))
        elif d.whole:
            found[d.key] = IntDistribution(int(d.low), int(d.high), log=d.log)
        else:
            found[d.key] = FloatDistribution(d.low, d.high, log=d.log)
    return found
