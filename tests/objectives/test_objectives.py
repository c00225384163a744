"""Objectives: targets, teachers, limits, and each loss against its formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import small_federation, steps_of, updated
from fedadc.data import from_arrays
from fedadc.data.batches import Augment, Batch, ClientData, Inputs
from fedadc.data.dataset import Normalization, Samples
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import FedADC, FedAvg
from fedadc.models import MLP, FlatModel
from fedadc.objectives import (
    CrossEntropy,
    GlobalDistillation,
    ModelContrast,
    NotTrueDistillation,
    Objective,
    RestrictedSoftmax,
)
from fedadc.objectives.self_confidence import SelfConfidence, confidence, confidence_target
from fedadc.rng import generator
from fedadc.system.determinism import deterministic
from fedadc.tasks import Classification
from fedadc.views.local import Local
from fedadc.views.local_work import LocalWork


@given(st.integers(2, 100), st.integers(0, 10**6), st.floats(0.1, 60))
def test_targets_are_probability_vectors_in_float32(classes: int, seed: int, sharpness: float) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=(16, classes)) * sharpness, dtype=torch.float32)
    y = torch.tensor(rng.integers(classes, size=16))
    counts = torch.tensor(rng.integers(0, 50, size=classes)) + torch.nn.functional.one_hot(y[0], classes)
    target = confidence_target(logits, y, confidence(counts, torch.float32))
    assert (target >= 0).all()
    assert torch.allclose(target.sum(dim=1), torch.ones(16), atol=1e-5)


def test_targets_are_never_negative_where_the_papers_form_is() -> None:
    """A teacher that is confidently wrong about classes the client lacks: 1 - sum falls below 0 in float32."""
    generator_ = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 100, generator=generator_) * 3
    logits[:, 0] -= 60  # the true class, and the only one the client holds
    y = torch.zeros(4096, dtype=torch.long)
    rho = torch.zeros(100)
    rho[0] = 1
    p = logits.softmax(dim=1)
    printed = 1 - (p * (1 - rho))[:, 1:].sum(dim=1)
    assert (printed < 0).any()  # the paper's form does fail here
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


def local_of(client: int = 1) -> tuple[Federation, Local]:
    torch.manual_seed(0)
    federation = Federation(
        model=MLP((5,), 4, [6]).double(), data=small_federation(), local=LocalWork(steps=2, batch_size=4)
    )
    data, state = federation.simulated.data(client), federation.start()
    return federation, Local(federation.model, data, state.theta, {}, {}, 0.1, 2, 1.0, lambda p: generator(0, p))


def gradient(objective: Any, local: Local) -> torch.Tensor:
    batch = next(local.data.batches([np.arange(4)], local.rng))
    theta = local.start + 0.3  # away from the teacher
    return local.model.gradient_of(lambda: objective(local.model, batch, local), theta)[0].clone()


def test_self_teacher_of_a_one_class_client_has_no_kl_gradient() -> None:
    """Its target is the student itself, so only (1 - lam) of the cross-entropy is left."""
    _, local = local_of()
    local.__dict__["class_counts"] = torch.tensor([0, 9, 0, 0])
    y = torch.full((4,), 1)
    batch = next(local.data.batches([np.arange(4)], local.rng))
    batch = type(batch)(batch.x, y, batch.position)
    theta = local.start + 0.3

    def at(objective: Any) -> torch.Tensor:
        return local.model.gradient_of(lambda: objective(local.model, batch, local), theta)[0].clone()

    assert torch.allclose(at(SelfConfidence(lam=0.4, teacher="self")), 0.6 * at(SelfConfidence(lam=0)), atol=1e-14)


@pytest.mark.parametrize("touched", [None, np.array([0, 3, 7, 9, 11])])
def test_rows_computed_once_agree_with_rows_per_batch(touched: Any) -> None:
    """One pass over the round's samples in index order, or a pass per batch: the same to rounding."""
    _, local = local_of(client=5)
    local.touched = touched
    made = []

    def logits(batch: Any) -> torch.Tensor:
        made.append(len(batch.y))
        return local.model.predict(local.start, batch.x)

    for position in (np.array([3, 0, 7]), np.array([9])):
        batch = next(local.data.batches([position], local.rng))
        direct = local.model.predict(local.start, batch.x)
        assert torch.allclose(local.per_sample("teacher", batch, logits), direct, atol=1e-12)
    assert sum(made) == (22 if touched is None else 5)  # each sample once
    assert not local.per_sample("teacher", batch, logits).requires_grad


def test_received_teacher_does_not_follow_the_student() -> None:
    """Even if its rows are first computed after the student has moved, the teacher is the received model."""
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


@pytest.mark.parametrize(
    ("objective", "bad"),
    [
        (SelfConfidence, {"lam": -0.1}),
        (SelfConfidence, {"lam": 1.1}),
        (SelfConfidence, {"tau": 0.0}),
        (SelfConfidence, {"teacher": "other"}),
        (NotTrueDistillation, {"beta": -0.1}),
        (NotTrueDistillation, {"beta": math.inf}),
        (NotTrueDistillation, {"tau": -1.0}),
        (GlobalDistillation, {"lam": math.nan}),
        (GlobalDistillation, {"tau": math.inf}),
        (GlobalDistillation, {"window": 0}),
        (GlobalDistillation, {"window": 1001}),
        (ModelContrast, {"mu": -1.0}),
        (ModelContrast, {"tau": 0.0}),
        (RestrictedSoftmax, {"alpha": -0.1}),
        (RestrictedSoftmax, {"alpha": 1.1}),
        (RestrictedSoftmax, {"alpha": math.nan}),
    ],
)
def test_impossible_settings_are_refused(objective: type[Objective], bad: dict[str, Any]) -> None:
    with pytest.raises(FedadcError, match=next(iter(bad))):
        objective(**bad)


# --- teachers --------------------------------------------------------------------------------------------------------

TEACHERS: dict[str, tuple[Objective, int]] = {  # objective, number of teacher models
    "self_confidence": (SelfConfidence(lam=0.6, tau=2.0), 1),
    "not_true_distillation": (NotTrueDistillation(beta=0.7, tau=2.0), 1),
    "global_distillation": (GlobalDistillation(lam=0.8, tau=2.0), 1),
    "global_distillation of 3": (GlobalDistillation(lam=0.8, tau=2.0, window=3), 1),
    "model_contrast": (ModelContrast(mu=2.0, tau=0.5), 2),
}
WITHOUT_TEACHER: list[Objective] = [
    CrossEntropy(), RestrictedSoftmax(), SelfConfidence(lam=0), SelfConfidence(teacher="self"),
    NotTrueDistillation(beta=0), GlobalDistillation(lam=0), GlobalDistillation(lam=0, window=3), ModelContrast(mu=0),
]  # fmt: skip


def taught(kind: type[Local] = Local, dtype: torch.dtype = torch.float64) -> Local:
    """A client whose received model, teacher and previous model all differ."""
    torch.manual_seed(0)
    federation = Federation(model=MLP((5,), 4, [6], projection=3).to(dtype), data=small_federation())
    data, start = federation.simulated.data(5), federation.start().theta
    teacher, previous = (start + 0.5 * torch.randn_like(start) for _ in range(2))
    rng = lambda purpose: generator(0, purpose)  # noqa: E731
    return kind(federation.model, data, start, {"teacher": teacher}, {"previous": previous}, 0.1, 2, 1.0, rng)


def batch_of(local: Local, position: Sequence[int]) -> Batch:
    return next(local.data.batches([np.array(position)], local.rng))


def moved(local: Local) -> Tensor:
    """A student that differs from all teachers."""
    return local.start + 0.5 * torch.randn(local.start.shape, generator=torch.Generator().manual_seed(1))


def loss_and_gradient(loss: Callable[[], Tensor], model: FlatModel, theta: Tensor) -> tuple[Tensor, Tensor]:
    with deterministic():
        g, value = model.gradient_of(loss, theta)
    return value, g.clone()


class Direct(Local):
    """Runs the teacher batch by batch, without a cache."""

    def per_sample(self, name: str, batch: Batch, make: Callable[[Batch], Tensor]) -> Tensor:
        with torch.no_grad():
            return make(batch)


@pytest.mark.parametrize("cut", [256, 4])
@pytest.mark.parametrize("touched", [None, np.array([0, 3, 7, 9, 11])])
@pytest.mark.parametrize("name", TEACHERS)
def test_cached_teacher_rows_equal_those_computed_batch_by_batch(
    name: str, touched: Any, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where the shape of a batch shows in the last bits."""
    monkeypatch.setattr("fedadc.views.local.TEACHER_BATCH", cut)
    objective = TEACHERS[name][0]
    once, direct = taught(dtype=torch.float32), taught(Direct, torch.float32)
    once.touched, student = touched, moved(once)
    for position in ([3, 0, 7], [9], [11, 3]):
        batch = batch_of(once, position)
        found, expected = (
            loss_and_gradient(partial(objective, at.model, batch, at), at.model, student) for at in (once, direct)
        )
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-5)


class Watched(MLP):
    """Records its inputs, separately in training and evaluation mode."""

    def __init__(self) -> None:
        super().__init__((1, 4, 4), 4, [6], projection=3)
        self.trained: list[Tensor] = []
        self.frozen: list[Tensor] = []

    def embed(self, x: Tensor) -> Tensor:
        (self.trained if self.training else self.frozen).append(x.clone())
        return super().embed(x)


def watched(objective: Objective, **kw: Any) -> tuple[Federation, Watched]:
    """Two clients with twenty images each; nothing is evaluated."""
    torch.manual_seed(0)
    images = np.random.default_rng(0).normal(size=(40, 1, 4, 4)).astype(np.float32)
    data = from_arrays(images, np.arange(40) % 4)
    federation = Federation(model=Watched(), data=data, test=0, clients=2, method=FedAvg(objective=objective), **kw)
    module = federation.model.module
    assert isinstance(module, Watched)
    module.trained.clear()  # inputs from the checks in the constructor
    module.frozen.clear()
    return federation, module


@pytest.mark.parametrize(
    ("work", "samples"),
    [
        (LocalWork(epochs=1, batch_size=6), 20),
        (LocalWork(epochs=5, batch_size=6), 20),
        (LocalWork(steps=30, batch_size=6), 20),
        (LocalWork(steps=2, batch_size=6), 12),  # only samples that the round uses
    ],
)
@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_sees_every_sample_once_a_round(name: str, work: LocalWork, samples: int) -> None:
    objective, models = TEACHERS[name]
    federation, module = watched(objective, local=work)
    for done in federation.rounds(3):
        if done.round == 1 and name == "model_contrast":  # there is no previous model yet
            assert not module.frozen
            continue
        assert sum(map(len, module.frozen)) == models * 2 * samples  # two clients
        assert len({x.numpy().tobytes() for x in torch.cat(module.frozen)}) == 2 * samples
        module.frozen.clear()


@pytest.mark.parametrize("objective", WITHOUT_TEACHER, ids=repr)
def test_a_teacher_without_weight_is_never_run(objective: Objective) -> None:
    federation, module = watched(objective)
    next(federation.rounds(1))
    assert module.trained and not module.frozen


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_sees_the_augmented_inputs(name: str) -> None:
    objective, models = TEACHERS[name]
    shown = []
    for augment in (None, Augment(crop=1, flip=True)):
        federation, module = watched(objective, local=LocalWork(steps=7, batch_size=6), augment=augment)
        start = federation.start()
        server = {key: start.server[key] for key in federation.coordinator.downlink}
        with deterministic():
            own = {key: value + 0.1 for key, value in objective.client_state(start.theta).items()}
            updated(federation, 1, 0.1, start.theta, 1, 7, server, own)
        shown.append(module)
    plain, augmented = shown
    assert len(augmented.frozen) == 7 * models
    for step, x in enumerate(augmented.trained):
        assert all(torch.equal(x, y) for y in augmented.frozen[models * step : models * (step + 1)])
        assert x.shape == plain.trained[step].shape and not torch.equal(x, plain.trained[step])


def formula(objective: Any, local: Local, batch: Batch) -> Callable[[], Any]:
    """Each loss as its paper prints it, with the teachers' predictions as constants."""
    model, y, tau, n = local.model, batch.y, objective.tau, len(batch.y)
    received = model.predict(local.start, batch.x)
    average = model.predict(local.server["teacher"], batch.x)
    z_glob, z_prev = (model.features(v, batch.x) for v in (local.start, local.client["previous"]))
    rho = local.class_counts / local.class_counts.max()

    def kl(target: Tensor, logits: Tensor) -> Any:
        return (torch.xlogy(target, target) - target * logits.softmax(dim=1).log()).sum() / n

    def loss() -> Any:
        logits, z = model(batch.x), model.embed(batch.x)
        ce = -logits.softmax(dim=1).log()[torch.arange(n), y].mean()
        if isinstance(objective, SelfConfidence):
            target = (received / tau).softmax(dim=1) * (1 - rho)
            target[torch.arange(n), y] = 0
            target[torch.arange(n), y] = 1 - target.sum(dim=1)
            return (1 - objective.lam) * ce + objective.lam * kl(target, logits / tau)
        if isinstance(objective, NotTrueDistillation):
            others = torch.arange(4) != y[:, None]
            theirs, ours = (v[others].view(n, 3) / tau for v in (received, logits))
            return ce + objective.beta * tau**2 * kl(theirs.softmax(dim=1), ours)
        if isinstance(objective, GlobalDistillation):
            teacher = average if objective.window > 1 else received
            return ce + objective.lam * tau**2 * kl((teacher / tau).softmax(dim=1), logits / tau)
        s_glob, s_prev = (
            ((z * other).sum(dim=1) / (z.norm(dim=1) * other.norm(dim=1)) / tau).exp() for other in (z_glob, z_prev)
        )
        return ce - objective.mu * (s_glob / (s_glob + s_prev)).log().mean()

    return loss


@pytest.mark.parametrize("position", [[3, 0, 7, 21, 9], [4]], ids=["five samples", "one"])
@pytest.mark.parametrize("name", TEACHERS)
def test_loss_and_gradient_are_those_of_the_formula_with_a_constant_teacher(name: str, position: list[int]) -> None:
    """Teacher and student share their parameters in memory: a gradient through the teacher would show."""
    objective, local = TEACHERS[name][0], taught()
    batch, student = batch_of(local, position), moved(local)
    expected = loss_and_gradient(formula(objective, local, batch), local.model, student)
    found = loss_and_gradient(partial(objective, local.model, batch, local), local.model, student)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    ce, _ = loss_and_gradient(partial(CrossEntropy(), local.model, batch, local), local.model, student)
    assert abs(float(found[0] - ce)) > 1e-3  # the additional term matters


# --- logits as parameters: gradients are those with respect to the logits --------------------------------------------


class Rows(nn.Module):
    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[x[:, 0].long()]


def local_with(module: nn.Module, start: Tensor, y: Sequence[int], classes: int, **own: Tensor) -> Local:
    """A client with one sample for each label, whose only input is its number."""
    model = FlatModel(module)
    samples = Samples(torch.arange(len(y))[:, None], torch.tensor(y))
    inputs = Inputs(Normalization(), model.dtype)
    data = ClientData(samples, np.arange(len(y)), Classification(classes), inputs, Augment())
    return Local(model, data, start.reshape(-1), {}, own, 0.1, 1, 1.0, lambda purpose: generator(0, purpose))


def on_logits(objective: Objective, student: Tensor, y: Sequence[int], teacher: Tensor | None = None) -> Any:
    """The loss and its gradient with respect to the student's logits."""
    local = local_with(Rows(student), student if teacher is None else teacher, y, student.shape[1])
    batch = batch_of(local, range(len(y)))
    loss, g = loss_and_gradient(partial(objective, local.model, batch, local), local.model, student.reshape(-1))
    return loss, g.view_as(student)


def test_not_true_distillation_never_moves_the_true_logit() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 6, 5, dtype=torch.float64)
    y = [0, 1, 2, 3, 4, 2]
    _, ce = on_logits(CrossEntropy(), student, y)
    _, both = on_logits(NotTrueDistillation(beta=3.0, tau=2.0), student, y, teacher)
    true = F.one_hot(torch.tensor(y), 5).bool()
    assert torch.equal(both[true], ce[true])
    assert ((both - ce)[~true].abs() > 1e-4).all()


def test_not_true_distillation_has_no_effect_with_two_classes() -> None:
    torch.manual_seed(0)
    student, teacher, y = torch.randn(5, 2), 9 * torch.randn(5, 2), [0, 1, 1, 0, 1]
    plain, both = on_logits(CrossEntropy(), student, y), on_logits(NotTrueDistillation(beta=7.0), student, y, teacher)
    assert torch.equal(plain[0], both[0]) and torch.equal(plain[1], both[1])


@given(st.integers(2, 6), st.integers(0, 10**6), st.sampled_from([1e4, 1e3, 30.0]), st.sampled_from([1e-2, 1.0, 10.0]))
def test_extreme_logits_stay_finite_in_float32(classes: int, seed: int, size: float, tau: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    student, teacher = ((torch.randint(-1, 2, (8, classes), generator=rng) * size).float() for _ in range(2))
    y = torch.randint(classes, (8,), generator=rng).tolist()
    for objective in (NotTrueDistillation(tau=tau), GlobalDistillation(tau=tau), SelfConfidence(tau=tau)):
        loss, g = on_logits(objective, student, y, teacher)
        assert torch.isfinite(loss) and torch.isfinite(g).all(), objective


@pytest.mark.parametrize("soft", [False, True])
def test_restricted_softmax_scales_in_the_type_of_the_logits(soft: bool) -> None:
    """0.1 in float32 is off by 1e-9, which float64 would show; the gradient by hand."""
    torch.manual_seed(0)
    student, y = torch.randn(4, 5, dtype=torch.float64), [0, 0, 2, 3]
    shares = [1, 0, 0.5, 0.5, 0] if soft else [1, 0, 1, 1, 0]
    scale = np.array([0.1 + 0.9 * share for share in shares])
    loss, g = on_logits(RestrictedSoftmax(alpha=0.1, soft=soft), student, y)
    z = np.exp(student.numpy() * scale)
    p = z / z.sum(axis=1, keepdims=True)
    assert float(loss) == pytest.approx(-np.log(p[np.arange(4), y]).mean(), abs=1e-14)
    np.testing.assert_allclose(g.numpy(), (p - np.eye(5)[y]) * scale / 4, rtol=0, atol=1e-15)
    loss, g = on_logits(RestrictedSoftmax(alpha=0.1, soft=soft), student.float(), y)
    assert loss.dtype == g.dtype == torch.float32


def test_evaluation_is_not_restricted() -> None:
    """With alpha = 0 a client's own scale would wipe out the classes that it lacks."""
    torch.manual_seed(0)
    model, data = MLP((5,), 4, [6]), small_federation()
    plain, restricted = (
        Federation(model=model, data=data, method=FedAvg(objective=objective))
        for objective in (CrossEntropy(), RestrictedSoftmax(alpha=0))
    )
    result = list(restricted.rounds(3))[-1]
    assert result.metrics == plain.evaluator(result.state)
    assert not torch.equal(list(plain.rounds(3))[-1].state.theta, result.state.theta)


# --- the average of the last global models ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 3, 20])
def test_the_teacher_is_the_mean_of_the_last_global_models(window: int) -> None:
    torch.manual_seed(0)
    method = FedADC(objective=GlobalDistillation(window=window))
    federation = Federation(model=MLP((5,), 4, [6]).double(), data=small_federation(), method=method, cohort=3)
    thetas = [federation.start().theta]
    assert torch.equal(federation.start().server["teacher"], thetas[0])
    for result in federation.rounds(6):
        thetas.append(result.state.theta)
        last = thetas[-window:]
        assert torch.allclose(result.state.server["teacher"], sum(last) / len(last), rtol=0, atol=1e-15)  # type: ignore[arg-type]
        assert len(result.state.server["recent"]) == len(last)


def test_a_teacher_of_several_models_is_sent_along_and_one_of_the_received_model_is_not() -> None:
    down = []
    for objective in (CrossEntropy(), GlobalDistillation(), GlobalDistillation(window=2)):
        torch.manual_seed(0)
        model = MLP((5,), 4, [6])
        federation = Federation(model=model, data=small_federation(), method=FedAvg(objective=objective), cohort=3)
        result = next(federation.rounds(1))
        assert result.bytes_up == 3 * 4 * result.state.theta.numel()
        down.append(result.bytes_down / result.bytes_up)
    assert down == [1, 1, 2]


# --- contrast --------------------------------------------------------------------------------------------------------


def contrasting(cohort: int = 3) -> Federation:
    torch.manual_seed(0)
    model, work = MLP((5,), 4, [6], projection=3).double(), LocalWork(epochs=1, batch_size=4, lr=0.3)
    method = FedAvg(objective=ModelContrast(mu=5.0))
    return Federation(model=model, data=small_federation(), method=method, local=work, cohort=cohort)


def test_the_previous_model_is_the_clients_own_from_its_last_round() -> None:
    federation = contrasting()
    state, again = federation.start(), 0
    for result in federation.rounds(6):
        now = result.state.clients
        for k in result.cohort:
            steps, own = int(steps_of(federation, np.array([k]))[0]), state.clients.get(k)
            with deterministic():
                report = updated(federation, result.round, result.lr, state.theta, k, steps, state=own)
            assert torch.equal(now[k]["previous"], report.state["previous"])
            assert torch.allclose(now[k]["previous"], state.theta - report.upload["delta"], rtol=0, atol=1e-14)
            again += own is not None
        for k in now.keys() - set(result.cohort):
            assert torch.equal(now[k]["previous"], state.clients[k]["previous"])
        state = result.state
    assert again > 3 and len(state.clients) > 3


def test_a_client_that_has_a_previous_model_trains_with_it() -> None:
    federation = contrasting()
    theta = federation.start().theta
    with deterministic():
        first, same, other = (
            updated(federation, 1, 0.3, theta, 2, 4, state=state).upload["delta"]
            for state in (None, {"previous": theta}, {"previous": theta + 1})
        )
    assert torch.equal(first, same) and not torch.allclose(first, other, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_contrast_of_a_first_round_is_constant(dtype: torch.dtype) -> None:
    """With a classifier of zeros, only the contrast has a gradient with respect to the features."""
    local, objective = taught(dtype=dtype), ModelContrast(mu=7.3)
    student, batch = moved(local).to(dtype), batch_of(local, [3, 0, 7])
    student[local.model.part("head")] = 0
    features = local.model.part("embed")
    _, g = loss_and_gradient(partial(objective, local.model, batch, local), local.model, student)
    assert g[features].abs().max() > 1e-3  # a client with a previous model
    local._rows.clear()
    local.client = objective.client_state(local.start)
    loss, g = loss_and_gradient(partial(objective, local.model, batch, local), local.model, student)
    assert g[features].abs().max() <= 100 * torch.finfo(dtype).eps  # zero up to rounding
    assert float(loss) == pytest.approx(math.log(4) + 7.3 * math.log(2), rel=1e-6)


class Points(nn.Module):
    """Representations as parameters."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.z = nn.Parameter(z.clone())
        self.head = nn.Linear(z.shape[1], 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def embed(self, x: Tensor) -> Tensor:
        return self.z[x[:, 0].long()]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits


@pytest.mark.parametrize(
    ("z", "z_glob", "z_prev", "contrast"),
    [
        ([3.0, 0.0], [1.0, 0.0], [-1.0, 0.0], 0.0),
        ([3.0, 0.0], [-1.0, 0.0], [1.0, 0.0], 2 / 1e-3),
        ([0.0, 2.0], [1.0, 0.0], [-1.0, 0.0], math.log(2)),
        ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0], math.log(2)),
        ([1.0, 0.0], [0.0, 0.0], [1.0, 0.0], 1 / 1e-3),
        ([1e15, 0.0], [-1e15, 1.0], [1e-7, 0.0], 2 / 1e-3),
        ([1e-30, 0.0], [1.0, 0.0], [1.0, 0.0], math.log(2)),
    ],
)
def test_extreme_cosines_stay_finite(z: list[float], z_glob: list[float], z_prev: list[float], contrast: float) -> None:
    def vector(point: list[float]) -> Tensor:
        return FlatModel(Points(torch.tensor([point]))).theta

    local = local_with(Points(torch.tensor([z])), vector(z_glob), [1], 2, previous=vector(z_prev))
    batch, objective = batch_of(local, [0]), ModelContrast(tau=1e-3)
    loss, g = loss_and_gradient(partial(objective, local.model, batch, local), local.model, vector(z))
    assert torch.isfinite(g).all() and float(loss) == pytest.approx(math.log(2) + contrast, rel=1e-5)


DERIVED = [
    CrossEntropy(),
    SelfConfidence(),
    SelfConfidence(lam=0, tau=2.0),
    SelfConfidence(lam=1.0),
    SelfConfidence(tau_squared=True),
]


@pytest.mark.parametrize("objective", DERIVED, ids=repr)
def test_a_closed_form_is_the_loss_and_its_derivative(objective: Any) -> None:
    """`derivative` equals the gradient of `__call__` by autograd."""
    local = taught()
    batch, theta = batch_of(local, [0, 3, 5]), moved(local)
    assert objective.derivative is not None
    g, loss = local.model.gradient_of(lambda: objective(local.model, batch, local), theta)
    g = g.clone()
    known, value = local.model.gradient_from(lambda logits: objective.derivative(logits, batch, local), batch.x, theta)
    assert torch.allclose(known, g, rtol=1e-12, atol=1e-14) and torch.allclose(value, loss, rtol=1e-12)


@pytest.mark.parametrize("objective", [SelfConfidence(tau=2.0), SelfConfidence(teacher="self")], ids=repr)
def test_there_is_no_closed_form_where_it_would_be_wrong(objective: Any) -> None:
    assert objective.derivative is None


def test_another_loss_does_not_inherit_a_closed_form() -> None:
    class Doubled(CrossEntropy):
        def __call__(self, model: Any, batch: Any, local: Any) -> Tensor:
            return 2 * super().__call__(model, batch, local)

    class Renamed(CrossEntropy):
        """The same loss."""

    class Mixin:
        def __call__(self, model: Any, batch: Any, local: Any) -> Tensor:
            return 3 * CrossEntropy()(model, batch, local)

    class Mixed(Mixin, CrossEntropy):  # type: ignore[misc]
        """A plain class in front."""

    assert Doubled().derivative is None and Mixed().derivative is None and Renamed().derivative is not None
