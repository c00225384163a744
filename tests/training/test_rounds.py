"""The outer loop: cohorts, the ordered mean, schedules, client state, evaluation that never touches training."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import small_federation
from fedadc.data import from_arrays
from fedadc.errors import FedadcError
from fedadc.evaluation.metrics import Evaluation
from fedadc.federation import Federation
from fedadc.methods import FedAdam, FedADC, FedAvg, FedAvgM, FedDyn, LocalOnly, Method
from fedadc.models import MLP, Logistic
from fedadc.schedules import Cosine
from fedadc.training.aggregate import BLOCK_LENGTH, ClientReport, OrderedMean, PartialSum, added, weighted
from fedadc.training.rounds import _cohort_order
from fedadc.views.local_work import LocalWork

WORK = LocalWork(epochs=1, batch_size=4, lr=0.2)


def federation(**kw: Any) -> Federation:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"model": MLP((5,), 4, [6]), "data": small_federation(), "local": WORK, "cohort": 3}
    return Federation(**{**settings, **kw})


def part(delta: torch.Tensor, weight: float = 1.0) -> PartialSum:
    return PartialSum(weighted({"delta": delta}, weight), [ClientReport(0, weight, 0.0, {}, finite=True)])


def test_blocks_that_were_added_ahead_give_the_bits_of_their_clients() -> None:
    vectors = list(torch.randn(21, 1000, generator=torch.Generator().manual_seed(0)))
    single, ahead = OrderedMean(), OrderedMean()
    for v in vectors:
        single.add(part(v))
    total: dict[str, torch.Tensor] = {}
    for v in vectors[:BLOCK_LENGTH]:
        total = added(total, {"delta": v})
    ahead.add(PartialSum(total, [part(v).reports[0] for v in vectors[:BLOCK_LENGTH]]))
    for v in vectors[BLOCK_LENGTH:]:
        ahead.add(part(v))
    assert ahead.count == 21 and torch.equal(ahead.result()["delta"], single.result()["delta"])
    assert torch.equal(ahead.result()["delta"], single.result()["delta"])  # asked again


def test_no_other_group_may_be_added_ahead() -> None:
    reports = [part(torch.ones(2)).reports[0]] * BLOCK_LENGTH
    mean = OrderedMean()
    with pytest.raises(AssertionError, match="not a block"):
        mean.add(PartialSum({"delta": torch.ones(2)}, reports[:3]))
    mean.add(part(torch.ones(2)))
    with pytest.raises(AssertionError, match="not a block"):
        mean.add(PartialSum({"delta": torch.ones(2)}, reports))


def test_hand_out_order_is_most_steps_first_then_number() -> None:
    assert _cohort_order(np.array([2, 5, 7, 9]), np.array([1, 3, 3, 2])).tolist() == [5, 7, 9, 2]


@given(
    st.lists(st.tuples(st.floats(0.5, 50), st.lists(st.floats(-5, 5), min_size=3, max_size=3)), min_size=1, max_size=30)
)
def test_ordered_mean_is_the_weighted_mean(uploads: list[tuple[float, list[float]]]) -> None:
    mean = OrderedMean()
    for weight, values in uploads:
        mean.add(part(torch.tensor(values, dtype=torch.float64), weight))
    expected = np.average([v for _, v in uploads], axis=0, weights=[w for w, _ in uploads])
    np.testing.assert_allclose(mean.result()["delta"].numpy(), expected, atol=1e-12)


def test_ordered_mean_adds_whole_blocks() -> None:
    """Bits: blocks of 8 summed on their own, then added in order."""
    vectors = list(torch.randn(21, 1000, generator=torch.Generator().manual_seed(0)))
    mean = OrderedMean()
    for v in vectors:
        mean.add(part(v))
    total = None
    for start in range(0, 21, BLOCK_LENGTH):
        block = vectors[start].clone()
        for v in vectors[start + 1 : start + BLOCK_LENGTH]:
            block = block + v
        total = block if total is None else total + block
    assert total is not None
    assert torch.equal(mean.result()["delta"], total / 21.0)


def test_the_mean_does_not_write_into_uploads() -> None:
    uploads = [torch.ones(3) for _ in range(20)]
    mean = OrderedMean()
    for u in uploads:
        mean.add(part(u))
    mean.result()
    assert all(torch.equal(u, torch.ones(3)) for u in uploads)


def test_prolonging_a_run_with_a_fixed_horizon_changes_nothing_before() -> None:
    work = replace(WORK, schedule=Cosine(horizon=4))
    short, long = (list(federation(local=work).rounds(n)) for n in (3, 6))
    assert torch.equal(short[-1].state.theta, long[2].state.theta)


def test_resuming_from_a_state_gives_the_same_bits() -> None:
    """Also with a schedule that has no horizon of its own: the rounds first asked for are part of the state."""
    work = replace(WORK, schedule=Cosine())
    whole = list(federation(method=FedADC(), local=work).rounds(6))
    again = list(federation(method=FedADC(), local=work).rounds(6, start=whole[2].state))
    longer = list(federation(method=FedADC(), local=work).rounds(8, start=whole[2].state))
    assert torch.equal(longer[2].state.theta, whole[-1].state.theta)
    assert [r.round for r in again] == [4, 5, 6]
    assert torch.equal(again[-1].state.theta, whole[-1].state.theta)
    assert torch.equal(again[-1].state.server["m"], whole[-1].state.server["m"])


@pytest.mark.parametrize("evaluation", [Evaluation(every=2), Evaluation(every=50, metrics=("top5",)), None])
def test_evaluation_never_changes_training(evaluation: Evaluation | None) -> None:
    plain = list(federation(evaluate=Evaluation(every=1)).rounds(5))
    other = list(federation(evaluate=evaluation).rounds(5))
    assert torch.equal(plain[-1].state.theta, other[-1].state.theta)
    due = [r.round for r in other if "test_accuracy" in r.metrics]
    assert due == {2: [2, 4, 5], 50: [5], 1: [1, 2, 3, 4, 5]}[evaluation.every if evaluation else 1]


class LargeProduct(torch.nn.Module):
    """A classifier with a scalar product so long that several threads share it, on any machine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(256, 4)
        self.terms = torch.nn.Parameter(torch.randn(300_000) / 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.flatten(1))) * self.terms.dot(self.terms)


def bits_by_threads() -> list[torch.Tensor]:
    """theta after a round of a model whose gradients differ between 1 and 2 threads."""
    images = from_arrays(np.random.default_rng(0).normal(size=(28, 1, 16, 16)).astype(np.float32), np.arange(28) % 4)
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        try:
            f = Federation(
                model=LargeProduct(), data=images, clients=4, local=LocalWork(epochs=1, batch_size=7, lr=0.1)
            )
            found.append(next(f.rounds(1)).state.theta)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
    return found


def test_threads_of_the_user_do_not_change_bits() -> None:
    assert torch.equal(*bits_by_threads())


@pytest.mark.skipif(os.cpu_count() == 1, reason="one core has one thread")
def test_threads_would_change_bits_if_they_were_let(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: without `deterministic` the same runs differ."""
    monkeypatch.setattr("fedadc.training.rounds.deterministic", contextlib.nullcontext)
    assert not torch.equal(*bits_by_threads())


def test_all_clients_one_step_full_batch_is_gradient_descent_on_the_mean_loss() -> None:
    """FedAvg with H = 1, all clients and full batches: theta - lr × the unweighted mean of the clients' gradients."""
    data = small_federation()
    torch.manual_seed(0)
    f = Federation(model=Logistic((5,), 4).double(), data=data, local=LocalWork(epochs=1, batch_size=100, lr=0.3))
    start, model = f.start().theta, f.model
    gradients = []
    for k in range(6):
        x, y = f.agreement.inputs.gather(f.data.train, f.clients[k])
        g, _ = model.gradient_of(lambda x=x, y=y: torch.nn.functional.cross_entropy(model(x), y), start)
        gradients.append(g.clone())
    after = next(f.rounds(1)).state.theta
    assert torch.allclose(after, start - 0.3 * torch.stack(gradients).mean(dim=0), atol=1e-14)


@dataclass(frozen=True, kw_only=True)
class Counts(FedAvg):
    """A method of a user's own with a client state: how often a client took part."""

    def client_state(self, theta: Any) -> Any:
        return {"rounds": torch.zeros(())}

    def finish(self, theta: Any, local: Any) -> Any:
        upload, _ = super().finish(theta, local)
        return upload, {"rounds": local.client["rounds"] + 1}


def test_client_state_stays_with_the_client() -> None:
    rounds = list(federation(method=Counts()).rounds(7))
    taken = Counter(k for r in rounds for k in r.cohort)
    assert {k: int(s["rounds"]) for k, s in rounds[-1].state.clients.items()} == dict(taken)
    assert not rounds[0].state.clients.keys() - set(rounds[0].cohort)  # earlier states are values, not views


def test_divergence_ends_with_advice() -> None:
    with pytest.raises(FedadcError, match=r"round \d+: no client's update is finite.*local\.lr or set local\.clip"):
        list(federation(local=LocalWork(steps=50, batch_size=4, lr=1e30)).rounds(5))


@pytest.mark.parametrize(("cohort", "word"), [(7, "only 6 clients"), (0, "at least 1"), (1.5, "share"), (0.0, "share")])
def test_impossible_cohorts(cohort: Any, word: str) -> None:
    with pytest.raises(FedadcError, match=word):
        federation(cohort=cohort)


def test_a_ratio_is_rounded_to_a_fixed_size() -> None:
    assert federation(cohort=0.5).coordinator.cohort == 3
    assert federation(cohort=0.01).coordinator.cohort == 1
    assert federation(cohort=None).coordinator.cohort == 6


def test_a_client_may_clear_its_state() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Clears(Counts):
        def finish(self, theta: Any, local: Any) -> Any:
            upload, state = super().finish(theta, local)
            return upload, {} if local.client and local.client["rounds"] >= 1 else state

        def client_state(self, theta: Any) -> Any:
            return {"rounds": torch.zeros(())}

    last = list(federation(method=Clears(), cohort=None).rounds(2))[-1]
    assert all(state == {} for state in last.state.clients.values())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"rounds": 0}, "at least 1"),
        ({"rounds": 2.5}, "whole number"),
        ({"rounds": 1, "start": "state"}, "RunState"),
        ({"rounds": 3, "stop_at_accuracy": 90}, "stop_at_accuracy"),
    ],
)
def test_impossible_rounds_are_refused_at_once(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(FedadcError, match=word):
        federation().rounds(**arguments)


def test_a_state_of_another_method_model_or_time_is_refused() -> None:
    state = list(federation().rounds(3))[-1].state
    for other, rounds in (({"method": FedADC()}, 5), ({"model": MLP((5,), 4, [9])}, 5), ({}, 2)):
        with pytest.raises(FedadcError, match=r"another model or method|at least 3"):
            federation(**other).rounds(rounds, start=state)


@pytest.mark.parametrize(
    ("method", "other"), [(FedAvg(), FedDyn()), (FedAvg(), FedAvgM()), (FedAvg(), FedAdam()), (FedDyn(), LocalOnly())]
)
def test_a_state_that_lacks_what_the_method_keeps_is_refused(method: Method, other: Method) -> None:
    state = list(federation(method=method, cohort=None).rounds(2))[-1].state
    with pytest.raises(FedadcError, match="another model or method"):
        list(federation(method=other).rounds(3, start=state))


def test_divergence_of_clients_alone_ends_with_advice() -> None:
    with pytest.raises(FedadcError, match=r"round \d+: no client's update is finite.*local\.lr or set local\.clip"):
        list(federation(method=LocalOnly(), local=LocalWork(steps=50, batch_size=4, lr=1e30)).rounds(3))


class Unchecked(FedAvg):
    def __post_init__(self) -> None:
        """Leaves out the checks of `Settings`."""


@pytest.mark.parametrize(
    "wrong",
    [{"model": "mlp"}, {"data": 3}, {"method": "fedavg"}, {"local": {"steps": 3}}, {"partition": "iid"},
     {"seed": "a"}, {"evaluate": 1}, {"cohort": "4"}, {"method": Unchecked(objective="ce")}, {"device": "gpu"}],
)  # fmt: skip
def test_wrong_types_are_one_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(FedadcError):
        federation(**wrong)


def test_a_run_whose_clients_cleared_their_states_goes_on() -> None:
    class Once(FedAvg):
        def client_state(self, theta: Any) -> Any:
            return {"rounds": torch.zeros(())}

        def finish(self, theta: Any, local: Any) -> Any:
            state = {} if local.client.get("rounds") else {"rounds": torch.ones(())}
            return super().finish(theta, local)[0], state

    rounds = list(federation(method=Once(), cohort=None).rounds(3))
    again = list(federation(method=Once(), cohort=None).rounds(3, start=rounds[1].state))
    assert torch.equal(again[-1].state.theta, rounds[-1].state.theta)


def test_a_method_that_overwrites_a_clients_past_state_is_told_so() -> None:
    """In memory the round before would change with it; read from a file it would not."""

    class InPlace(FedDyn):
        def finish(self, theta: Any, local: Any) -> Any:
            upload, new = super().finish(theta, local)
            return upload, {"h": local.client["h"].copy_(new["h"])}

    with pytest.raises(FedadcError, match="overwrote what a client received or kept"):
        list(federation(method=InPlace(), cohort=None).rounds(2))
