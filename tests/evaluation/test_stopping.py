"""Patience, against a naive rule that looks at the whole list of values, and as a function of the records alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import small_federation
from fedadc.errors import FedadcError
from fedadc.evaluation.metrics import Evaluation
from fedadc.evaluation.stopping import BestValue, Stopper, Stopping, higher_is_better, stop_reason
from fedadc.federation import Federation
from fedadc.models import MLP
from fedadc.views.local_work import LocalWork

VALUES = st.lists(st.one_of(st.none(), st.integers(0, 12).map(lambda n: n / 8)), min_size=1, max_size=25)


def naive_end(values: list[float | None], patience: int, min_delta: float) -> int:
    """The first position after which the last `patience` values have no improvement; all, if there is none."""
    improved, best = [], None
    for value in values:
        better = value is not None and (best is None or value > best + min_delta)
        best = value if better else best
        improved.append(better)
    ends = [t for t in range(patience, len(values) + 1) if not any(improved[t - patience : t])]
    return min(ends, default=len(values))


def records_of(
    values: list[float | None], every: int = 1, sign: int = 1, name: str = "accuracy"
) -> list[dict[str, Any]]:
    """A record per round, of which every so many are evaluated."""
    found: list[dict[str, Any]] = [{"round": t} for t in range(1, every * len(values) + 1)]
    for number, value in enumerate(values, start=1):
        found[every * number - 1][f"validation_{name}"] = None if value is None else sign * value
    return found


@given(VALUES, st.integers(1, 5), st.sampled_from([0.0, 0.125, 0.25]), st.integers(1, 3))
def test_a_run_ends_where_the_naive_rule_ends_it(
    values: list[float | None], patience: int, min_delta: float, every: int
) -> None:
    stop, found = Stopping(patience=patience, min_delta=min_delta), records_of(values, every)
    ends = [t for t in range(1, len(found) + 1) if stop_reason(stop, Evaluation(every=every), 1000, found[:t])]
    assert min(ends, default=len(found)) == every * naive_end(values, patience, min_delta)


@given(VALUES, st.integers(1, 5))
def test_of_a_loss_lower_is_better(values: list[float | None], patience: int) -> None:
    by_accuracy, by_loss = Stopping(patience=patience), Stopping(patience=patience, metric="validation_loss")
    for rounds in range(1, len(values) + 1):
        one = stop_reason(by_accuracy, Evaluation(), 1000, records_of(values)[:rounds])
        other = stop_reason(by_loss, Evaluation(), 1000, records_of(values, sign=-1, name="loss")[:rounds])
        assert bool(one) == bool(other)


@given(VALUES)
def test_the_best_value_is_the_first_of_the_largest(values: list[float | None]) -> None:
    best, known = BestValue(), [(t, v) for t, v in enumerate(values, start=1) if v is not None]
    for record in records_of(values):
        best.see(record["round"], record)
    if known:
        top = max(v for _, v in known)
        assert (best.round, best.value) == (min(t for t, v in known if v == top), top)
    else:
        assert best.round == 0


def test_evaluations_that_a_run_in_one_go_would_not_have_made_do_not_count() -> None:
    """Rounds 10 and 20 were the last ones once; every fourth round is evaluated."""
    evaluated = {4: 0.5, 8: 0.4, 10: 0.3, 12: 0.6, 16: 0.1, 20: 0.1}
    found = [{"round": t, **({"validation_accuracy": evaluated[t]} if t in evaluated else {})} for t in range(1, 21)]
    stop = Stopping(patience=2)
    assert stop_reason(stop, Evaluation(every=4), 10, found[:10])  # planned to be the last: it counts
    assert not stop_reason(stop, Evaluation(every=4), 100, found[:10])
    assert not stop_reason(stop, Evaluation(every=4), 100, found[:16])
    assert "for 2 evaluations (best 0.6 at round 12)" in stop_reason(stop, Evaluation(every=4), 100, found)


@pytest.mark.parametrize(("name", "higher"), [("validation_accuracy", True), ("validation_macro_f1", True),
                                              ("validation_loss", False), ("test_mse", False), ("test_mae", False),
                                              ("test_r2", True), ("swa_test_loss", False),
                                              ("brier", False), ("calibration_error", False), ("auroc", True),
                                              ("test_accuracy_spread", False), ("test_accuracy_worst", True),
                                              ("test_mse_worst", False), ("test_mse_spread", False),
                                              ("mse", False), ("mae", False)])  # fmt: skip
def test_which_direction_is_better(name: str, higher: bool) -> None:
    assert higher_is_better(name) == higher


def test_an_evaluation_without_the_metric_counts_for_patience() -> None:
    """R² of equal labels is not defined, so no record has it; a round that is not evaluated does not count."""
    for stop in (Stopping(patience=2), Stopping(patience=2, metric="validation_r2")):
        best, name = BestValue(stop.metric), stop.metric or "the score of validation data"
        for t in (1, 2):
            assert not best.see(t, {"round": t, "validation_mse": 1.0 / t}) and best.since == t
        assert not best.see(3, {"round": 3, "test_mse": 1.0}) and best.since == 2
        found = [{"round": t, "validation_mse": 1.0} for t in (1, 2)]
        reason = stop_reason(stop, Evaluation(), 9, found)
        assert reason == f"{name} has not improved for 2 evaluations (it never had a finite value)"
        assert not stop_reason(stop, Evaluation(), 9, found[:1])
        assert best.see(4, {"validation_r2": 0.5}) and best.since == 0
        assert not best.see(5, {"validation_mse": 1.0}) and best.since == 1


def test_the_best_model_is_the_best_by_value_though_its_step_was_too_small_to_count() -> None:
    values = [0.8, 0.75, 0.82, 0.85, 0.7]
    stop, found = Stopping(patience=4, min_delta=0.1), records_of([*values])
    reason = stop_reason(stop, Evaluation(), 99, found)
    expected = "validation_accuracy has not improved by more than 0.1 over 0.8 for 4 evaluations (best 0.85 at round 4)"
    assert reason == expected
    kept = BestValue()
    assert [kept.see(t, record) for t, record in enumerate(found, start=1)] == [True, False, True, True, False]
    slow = records_of([0.5, 0.55, 0.61, 0.65, 0.72])  # two steps of 0.06 are one improvement
    assert not stop_reason(Stopping(patience=2, min_delta=0.1), Evaluation(), 99, slow)


def federation(validation: float | None = 0.3) -> Federation:
    torch.manual_seed(0)
    data = small_federation()
    work = LocalWork(steps=2, batch_size=4, lr=0.5)
    return Federation(model=MLP((5,), 4, [6]).double(), data=data, local=work, cohort=2, validation=validation)


def test_a_loop_of_ones_own_goes_on_where_it_was_with_its_history() -> None:
    stop, whole = Stopping(patience=3), federation()
    results = list(whole.rounds(60, stop=stop))
    end = results[-1]
    values = [r.metrics["validation_accuracy"] for r in list(whole.rounds(end.round + 1))]
    assert end.round == naive_end(values[: end.round], 3, 0.0) < 60 and "has not improved for 3" in end.stopped
    assert not any(r.stopped for r in results[:-1])
    for cut in range(1, end.round):
        again = list(federation().rounds(60, start=results[cut - 1].state, stop=stop, history=results[:cut]))
        assert again[-1].round == end.round and torch.equal(again[-1].state.theta, end.state.theta)
    assert list(whole.rounds(60, start=end.state, stop=stop, history=results)) == []


def test_mistakes_are_named() -> None:
    with pytest.raises(FedadcError, match=r"stop\.patience needs validation data; hold out"):
        federation(validation=None).rounds(3, stop=Stopping(patience=2))
    with pytest.raises(FedadcError, match=r"stop\.metric: validation_top5 is not measured; these are: validation_acc"):
        federation().rounds(3, stop=Stopping(patience=2, metric="validation_top5"))
    with pytest.raises(FedadcError, match="give stop or stop_at_accuracy, not both"):
        federation().rounds(3, stop_at_accuracy=0.5, stop=Stopping(patience=2))
    with pytest.raises(FedadcError, match="stop must be a Stopping, not 3"):
        federation().rounds(3, stop=3)  # type: ignore[arg-type]
    for wrong, words in [({"patience": 0}, "patience must be at least 1"), ({"min_delta": -1.0}, "min_delta must be"),
                         ({"min_delta": float("nan")}, "min_delta must be"), ({"patience": 2.5}, "patience must be"),
                         ({"metric": "test_loss"}, "metric must be one of validation data")]:  # fmt: skip
        with pytest.raises(FedadcError, match=words):
            Stopping(**wrong)  # type: ignore[arg-type]


def test_no_round_is_trained_beyond_the_one_that_ends_it() -> None:
    stopper, asked = Stopper(Stopping(accuracy=0.5), Evaluation(), 9), []

    def stream() -> Any:
        for result in federation().rounds(9):
            asked.append(result.round)
            yield result

    stopper.stop = Stopping(patience=1)
    ended = list(stopper.follow(stream()))
    assert asked == [r.round for r in ended] and len(asked) < 9
