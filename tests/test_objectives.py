"""The self-confidence loss of section III: its targets, its limits, its teacher."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import small_federation
from fedadc.errors import FedadcError
from fedadc.federation.federation import Federation
from fedadc.federation.local import Local, LocalWork
from fedadc.models import MLP
from fedadc.objectives.self_confidence import SelfConfidence, confidence, confidence_target
from fedadc.rng import generator


@given(st.integers(2, 100), st.integers(0, 10**6), st.floats(0.1, 60))
def test_targets_are_probability_vectors_in_float32(classes: int, seed: int, sharpness: float) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=(16, classes)) * sharpness, dtype=torch.float32)
    y = torch.tensor(rng.integers(classes, size=16))
    counts = torch.tensor(rng.integers(0, 50, size=classes)) + torch.nn.functional.one_hot(y[0], classes)
    target = confidence_target(logits, y, confidence(counts, torch.float32))
    assert (target >= 0).all()
    assert torch.allclose(target.sum(dim=1), torch.ones(16), atol=1e-5)


def test_never_negative_where_the_printed_form_is() -> None:
    """A teacher that is confidently wrong about classes the client lacks: 1 - sum falls below 0 in float32."""
    generator_ = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 100, generator=generator_) * 3
    logits[:, 0] -= 60  # the true class, and the only one the client holds
    y = torch.zeros(4096, dtype=torch.long)
    rho = torch.zeros(100)
    rho[0] = 1
    p = logits.softmax(dim=1)
    printed = 1 - (p * (1 - rho))[:, 1:].sum(dim=1)
    assert (printed < 0).any()  # the trap is real
    assert (confidence_target(logits, y, rho) >= 0).all()


def test_uniform_counts_give_the_one_hot_label() -> None:
    logits, y = torch.randn(32, 10, dtype=torch.float64), torch.randint(10, (32,))
    target = confidence_target(logits, y, confidence(torch.full((10,), 7), torch.float64))
    assert torch.allclose(target, torch.nn.functional.one_hot(y, 10).double(), atol=1e-15)


def test_a_client_with_one_class_has_the_teacher_as_target() -> None:
    logits = torch.randn(8, 5, dtype=torch.float64)
    y = torch.full((8,), 2)
    target = confidence_target(logits, y, confidence(torch.tensor([0, 0, 9, 0, 0]), torch.float64))
    assert torch.allclose(target, logits.softmax(dim=1), atol=1e-15)


def test_confidence_is_the_share_of_the_largest_class() -> None:
    assert confidence(torch.tensor([2, 0, 8, 4]), torch.float64).tolist() == [0.25, 0, 1, 0.5]


def local_of(client: int = 1, augment: Any = None) -> tuple[Federation, Local]:
    torch.manual_seed(0)
    federation = Federation(
        model=MLP((5,), 4, [6]).double(), data=small_federation(), local=LocalWork(steps=2, batch_size=4)
    )
    place, state = federation.workplace, federation.start()
    return federation, Local(
        place.model, place.data(client), state.theta, {}, {}, 0.1, 2, 1.0, lambda p: generator(0, p)
    )


def gradient(objective: Any, local: Local) -> torch.Tensor:
    batch = next(local.data.batches([np.arange(4)], local.rng("augment")))
    theta = local.start + 0.3  # away from the teacher
    return local.model.gradient_of(lambda: objective(local.model, batch, local), theta)[0].clone()


def test_self_teacher_of_a_one_class_client_has_no_kl_gradient() -> None:
    """Its target is the student itself, so only (1 - lam) of the cross-entropy is left."""
    _, local = local_of()
    local.__dict__["class_counts"] = torch.tensor([0, 9, 0, 0])
    y = torch.full((4,), 1)
    batch = next(local.data.batches([np.arange(4)], local.rng("augment")))
    batch = type(batch)(batch.x, y, batch.position)
    theta = local.start + 0.3

    def at(objective: Any) -> torch.Tensor:
        return local.model.gradient_of(lambda: objective(local.model, batch, local), theta)[0].clone()

    assert torch.allclose(at(SelfConfidence(lam=0.4, teacher="self")), 0.6 * at(SelfConfidence(lam=0)), atol=1e-14)


@pytest.mark.parametrize("touched", [None, np.array([0, 3, 7, 9, 11])])
def test_rows_made_once_agree_with_the_direct_form(touched: Any) -> None:
    """One pass over the round's samples in index order, or a pass per batch: the same to rounding."""
    _, local = local_of(client=5)
    local.touched = touched
    made = []

    def logits(batch: Any) -> torch.Tensor:
        made.append(len(batch.y))
        return local.model.predict(local.start, batch.x)

    for position in (np.array([3, 0, 7]), np.array([9])):
        batch = next(local.data.batches([position], local.rng("augment")))
        direct = local.model.predict(local.start, batch.x)
        assert torch.allclose(local.per_sample("teacher", batch, logits), direct, atol=1e-12)
    assert sum(made) == (22 if touched is None else 5)  # each sample once
    assert not local.per_sample("teacher", batch, logits).requires_grad


def test_received_teacher_does_not_follow_the_student() -> None:
    """Asked for the first time after the student has moved, it still is the received model."""
    gradients = []
    for moved in (0.0, 1.0):
        _, local = local_of()
        local.model.theta.add_(moved)
        gradients.append(gradient(SelfConfidence(lam=1.0), local))
    assert torch.equal(*gradients)


def test_tau_squared_multiplies_the_kl_term_only() -> None:
    _, local = local_of()
    ce, plain, scaled = (
        gradient(SelfConfidence(lam=lam, tau=3.0, tau_squared=squared), local)
        for lam, squared in ((0.0, False), (1.0, False), (1.0, True))
    )
    assert torch.allclose(scaled, 9 * plain, atol=1e-13)
    mixed = gradient(SelfConfidence(lam=0.25, tau=3.0, tau_squared=True), local)
    assert torch.allclose(mixed, 0.75 * ce + 0.25 * scaled, atol=1e-13)


@pytest.mark.parametrize("bad", [{"lam": -0.1}, {"lam": 1.1}, {"tau": 0.0}, {"teacher": "other"}])
def test_impossible_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(FedadcError, match=next(iter(bad))):
        SelfConfidence(**bad)
