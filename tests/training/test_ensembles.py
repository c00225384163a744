"""Averages of the global models over rounds: their closed forms, and that training does not notice them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import small_federation
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import FedADC, FedAvg, FedDyn, LocalOnly, Method
from fedadc.models import MLP
from fedadc.objectives import GlobalDistillation, SelfConfidence
from fedadc.runs.checkpoint import Checkpoints
from fedadc.runs.runner import run
from fedadc.training.ensembles import EMA, SWA, Ensembles, Lookahead
from fedadc.training.state import Round
from fedadc.views.local_work import LocalWork

ALL = Ensembles(swa=SWA(start=3, every=2), ema=EMA(decay=0.7, start=2), lookahead=Lookahead(every=3, alpha=0.4))


def federation(method: Method | None = None, ensembles: Ensembles = ALL, **kw: Any) -> Federation:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "model": MLP((5,), 4, [6]).double(),
        "data": small_federation(),
        "method": method or FedADC(beta=0.8),
        "local": LocalWork(steps=3, batch_size=4, lr=0.1),
        "cohort": 3,
        "ensembles": ensembles,
    }
    return Federation(**{**settings, **kw})


def models(rounds: list[Round]) -> list[np.ndarray]:
    return [r.state.theta.numpy() for r in rounds]


def test_swa_is_the_mean_of_every_second_model_from_the_third_on() -> None:
    rounds = list(federation().rounds(8))
    theta = models(rounds)
    for t, result in enumerate(rounds, start=1):
        counted = [theta[r - 1] for r in range(3, t + 1, 2)] or [theta[t - 1]]
        np.testing.assert_allclose(result.state.server["swa"].numpy(), np.mean(counted, axis=0), rtol=0, atol=1e-14)


def test_ema_is_the_weighted_sum_of_the_models() -> None:
    rounds = list(federation().rounds(8))
    theta = models(rounds)
    weights = [0.7**6, *(0.3 * 0.7 ** (8 - r) for r in range(3, 9))]  # of rounds 2, 3, ..., 8
    expected = sum(w * model for w, model in zip(weights, theta[1:], strict=True))
    np.testing.assert_allclose(rounds[-1].state.server["ema"].numpy(), expected, rtol=0, atol=1e-14)
    assert sum(weights) == pytest.approx(1)
    assert torch.equal(rounds[1].state.server["ema"], rounds[1].state.theta)


def test_lookahead_goes_a_part_of_the_way_every_third_round() -> None:
    chosen = federation()
    rounds = list(chosen.rounds(8))
    slow = chosen.start().theta.numpy()
    for result in rounds:
        if result.round % 3 == 0:
            slow = slow + 0.4 * (result.state.theta.numpy() - slow)
        np.testing.assert_allclose(result.state.server["lookahead"].numpy(), slow, rtol=0, atol=1e-14)


def test_training_does_not_notice() -> None:
    plain, watched = list(federation(ensembles=Ensembles()).rounds(7)), list(federation().rounds(7))
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(a.state.theta, b.state.theta) and torch.equal(a.state.server["m"], b.state.server["m"])
        assert a.metrics == {k: b.metrics[k] for k in a.metrics}
        assert a.bytes_down == b.bytes_down  # nobody asked for them
        assert {"swa_test_accuracy", "ema_test_loss", "lookahead_test_accuracy"} <= b.metrics.keys()


def test_lookahead_that_resets_trains_on_from_the_slow_weights() -> None:
    """Every two rounds, theta = slow = (slow + theta') / 2, with theta' as two plain rounds from slow would give it."""
    resetting = Ensembles(lookahead=Lookahead(every=2, alpha=0.5, reset=True))
    chosen, plain = federation(FedAvg(), resetting), federation(FedAvg(), Ensembles())
    state = plain.start()
    for result in chosen.rounds(6):
        if result.round % 2:
            continue
        fast = list(plain.rounds(result.round, state))[-1].state
        slow = state.theta + 0.5 * (fast.theta - state.theta)
        assert torch.equal(result.state.theta, slow) and torch.equal(result.state.server["lookahead"], slow)
        state = replace(fast, theta=slow)


def test_lookahead_of_every_round_that_goes_all_the_way_is_the_plain_run() -> None:
    whole = Ensembles(lookahead=Lookahead(every=1, alpha=1.0, reset=True))
    plain = list(federation(ensembles=Ensembles()).rounds(5))[-1]
    again = list(federation(ensembles=whole).rounds(5))[-1]
    torch.testing.assert_close(again.state.theta, plain.state.theta, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["swa", "ema", "lookahead"])
@pytest.mark.parametrize("objective", [SelfConfidence, GlobalDistillation])
def test_an_ensemble_can_be_the_teacher(objective: Any, name: str) -> None:
    """What is sent along is the average; where it is the received model itself, so is the result."""
    method = FedADC(objective=objective(teacher=name))
    result = list(federation(method).rounds(6))[-1]
    vector = result.state.theta.numel() * 8 * 3
    assert result.bytes_down == 3 * vector  # theta, m and the teacher
    usual = list(federation(FedADC(objective=objective())).rounds(6))[-1]
    assert not torch.equal(result.state.theta, usual.state.theta)
    same = Ensembles(swa=SWA(start=100), ema=EMA(decay=0), lookahead=Lookahead(every=1, alpha=1.0))
    again = list(federation(method, same).rounds(6))[-1]
    torch.testing.assert_close(again.state.theta, usual.state.theta, rtol=0, atol=1e-12)


def test_a_window_and_an_average_that_hold_the_same_models_teach_the_same() -> None:
    """From a state in which FedGKD's window of two and SWA's two models are theta_1 and theta_2."""
    window = FedAvg(objective=GlobalDistillation(window=2, lam=0.5))
    swa = FedAvg(objective=GlobalDistillation(teacher="swa", lam=0.5))
    every = Ensembles(swa=SWA())
    by_window = list(federation(window, every).rounds(3))
    state = by_window[1].state
    torch.testing.assert_close(state.server["teacher"], state.server["swa"], rtol=0, atol=1e-14)
    third = next(federation(swa, every).rounds(3, replace(state, server={"swa": state.server["swa"]})))
    torch.testing.assert_close(third.state.theta, by_window[2].state.theta, rtol=0, atol=1e-12)
    plain = next(federation(FedAvg(), every).rounds(3, state))
    assert not torch.allclose(plain.state.theta, third.state.theta, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", [FedADC(), FedDyn(), FedAvg(objective=SelfConfidence(teacher="ema"))])
def test_they_go_on_from_a_checkpoint_with_the_same_bits(method: Method, tmp_path: Path) -> None:
    whole = list(federation(method).rounds(7))[-1].state
    first = federation(method)
    Checkpoints(tmp_path / "kept", first).write(list(first.rounds(4))[-1].state)
    second = federation(method)
    found = Checkpoints(tmp_path / "kept", second).newest()
    assert found is not None and found.round == 4
    again = list(second.rounds(7, found))[-1].state
    assert again.server.keys() == whole.server.keys() >= {"swa", "ema", "lookahead"}
    for name, vector in {"theta": whole.theta, **whole.server}.items():
        assert torch.equal({"theta": again.theta, **again.server}[name], vector), name


def test_a_round_in_which_nobody_counts_is_a_round_all_the_same() -> None:
    from fedadc.training.faults import Faults

    chosen = Ensembles(ema=EMA(decay=0.5))
    trained = list(federation(ensembles=chosen).rounds(3))[-1].state
    result = list(federation(ensembles=chosen, faults=Faults(drop=1.0)).rounds(4, trained))[-1].state
    assert torch.equal(result.theta, trained.theta) and not torch.equal(trained.theta, trained.server["ema"])
    assert torch.equal(result.server["ema"], 0.5 * trained.server["ema"] + 0.5 * trained.theta)


def test_the_others_average_what_lookahead_sets_back() -> None:
    every = Ensembles(swa=SWA(), ema=EMA(decay=0.5), lookahead=Lookahead(every=2, reset=True))
    rounds = list(federation(FedAvg(), every).rounds(6))
    mean = np.mean(models(rounds), axis=0)
    np.testing.assert_allclose(rounds[-1].state.server["swa"].numpy(), mean, rtol=0, atol=1e-14)
    ema = models(rounds)[0]
    for theta in models(rounds)[1:]:
        ema = 0.5 * ema + 0.5 * theta
    np.testing.assert_allclose(rounds[-1].state.server["ema"].numpy(), ema, rtol=0, atol=1e-14)


def test_feddyn_refuses_a_theta_that_is_set_back() -> None:
    with pytest.raises(FedadcError, match=r"ensembles\.lookahead\.reset to false"):
        federation(FedDyn(), Ensembles(lookahead=Lookahead(reset=True)))


def test_a_run_saves_them_and_evaluates_them(tmp_path: Path) -> None:
    config = {
        "rounds": 3,
        "data": {"name": "digits", "clients": 10},
        "model": {"name": "mlp", "hidden": [8]},
        "method": {"name": "fedadc+"},
        "objective": {"teacher": "ema"},
        "ensembles": {"swa": {}, "ema": {"decay": 0.5}},
        "cohort": {"size": 2},
    }
    result = run(config, out=tmp_path / "run")
    assert "swa_test_accuracy" in result.history[-1]
    assert {f.name for f in (tmp_path / "run").glob("model*")} == {
        "model.safetensors", "model-swa.safetensors", "model-ema.safetensors"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"method": FedAvg(objective=SelfConfidence(teacher="swa")), "ensembles": Ensembles()}, "enable it with"),
        ({"method": LocalOnly()}, "has no global models over which swa, ema, lookahead could average"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedadcError, match=sentence):
        federation(**settings)


@pytest.mark.parametrize(
    ("kind", "values"),
    [(SWA, {"start": 0}), (SWA, {"every": 0}), (EMA, {"decay": 1.0}), (EMA, {"start": 0}), (Lookahead, {"alpha": 0}),
     (Lookahead, {"every": 0}), (SelfConfidence, {"teacher": "nobody"}),
     (GlobalDistillation, {"teacher": "swa", "window": 2})],
)  # fmt: skip
def test_bad_settings_are_refused(kind: Any, values: dict[str, Any]) -> None:
    with pytest.raises(FedadcError):
        kind(**values)
