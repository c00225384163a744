"""Reductions: settings under which two methods are equal, with unequal clients and partial participation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from conftest import small_federation, steps_of, updated
from fedadc.data import from_arrays, from_clients
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import (
    FedAdagrad,
    FedAdam,
    FedADC,
    FedADCDouble,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedNova,
    FedProx,
    FedYogi,
    Method,
    Scaffold,
    SlowMo,
)
from fedadc.models import MLP, Logistic
from fedadc.objectives import (
    GlobalDistillation,
    ModelContrast,
    NotTrueDistillation,
    Objective,
    RestrictedSoftmax,
    SelfConfidence,
)
from fedadc.partitions import Pooled, SortAndPartition
from fedadc.schedules import Cosine
from fedadc.training.state import Round
from fedadc.views.local_work import LocalWork

WORK = LocalWork(epochs=2, batch_size=4, lr=0.2, weight_decay=0.01, clip=2.0, schedule=Cosine(final=0.2))


MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.6])


def run(method: Method, work: LocalWork = WORK, model: Any = None, data: Any = None, **kw: Any) -> list[Round]:
    """Five rounds; with a projection head if the objective needs one."""
    torch.manual_seed(0)
    module = Logistic((5,), 4) if model is Logistic else MLP((5,), 4, hidden=[7], projection=model)
    settings: dict[str, Any] = {"cohort": 3, "seed": 5, "test": 0, **kw}
    federation = Federation(
        model=module.double(), data=data or small_federation(), method=method, local=work, **settings
    )
    return list(federation.rounds(5))


def trained(*args: Any, **kwargs: Any) -> Round:
    return run(*args, **kwargs)[-1]


def theta(*args: Any, **kwargs: Any) -> np.ndarray:
    return trained(*args, **kwargs).state.theta.numpy()


def assert_equal(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


@dataclass(frozen=True, kw_only=True)
class LinearLoss(Objective):
    """Linear in theta for a linear model: its gradient is the same everywhere."""

    scale: float = 1.0

    def __call__(self, model: Any, batch: Any, local: Any) -> torch.Tensor:
        z = model(batch.x)
        return self.scale * (z * torch.linspace(-1, 1, z.shape[1], dtype=torch.float64)).mean()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("method", [SlowMo(beta=0), FedADC(beta=0), FedADC(beta=0, nesterov=True)])
def test_without_momentum_all_are_fedavg(method: Method, momentum: float) -> None:
    work = replace(WORK, momentum=momentum)
    assert_equal(theta(method, work), theta(FedAvg(), work))


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_local_beta_fedadc_is_slowmo(nesterov: bool) -> None:
    ours = theta(FedADC(beta=0.8, beta_local=0, nesterov=nesterov, server_lr=0.7))
    assert_equal(ours, theta(SlowMo(beta=0.8, server_lr=0.7)))


def test_one_local_step_heavy_ball_is_slowmo_and_nesterov_is_not() -> None:
    one = LocalWork(steps=1, batch_size=4, lr=0.2, weight_decay=0.01)
    slowmo = theta(SlowMo(beta=0.8), one)
    assert_equal(theta(FedADC(beta=0.8), one), slowmo)
    assert np.abs(theta(FedADC(beta=0.8, nesterov=True), one) - slowmo).max() > 1e-4


@pytest.mark.parametrize("nesterov", [False, True])
def test_on_linear_losses_fedadc_is_slowmo_for_any_h(nesterov: bool) -> None:
    linear, work = LinearLoss(), replace(WORK, weight_decay=0.0, clip=None)
    ours = theta(FedADC(beta=0.8, nesterov=nesterov, objective=linear), work, Logistic)
    assert_equal(ours, theta(SlowMo(beta=0.8, objective=linear), work, Logistic))


def test_double_momentum_without_phi_is_heavy_ball() -> None:
    assert_equal(theta(FedADCDouble(beta=0.8, phi=0, server_lr=0.9)), theta(FedADC(beta=0.8, server_lr=0.9)))


def test_double_momentum_is_not_local_momentum() -> None:
    """phi v + (1 - phi) g averages; v = mu v + g adds up."""
    double = theta(FedADCDouble(beta=0.8, phi=0.6))
    assert np.abs(double - theta(FedADC(beta=0.8), replace(WORK, momentum=0.6))).max() > 1e-3


def test_double_momentum_refuses_local_momentum() -> None:
    with pytest.raises(FedadcError, match=r"local\.momentum"):
        trained(FedADCDouble(), replace(WORK, momentum=0.5))


def test_fedadc_plus_with_lambda_zero_is_fedadc() -> None:
    assert_equal(theta(FedADC(objective=SelfConfidence(lam=0))), theta(FedADC()))


@pytest.mark.parametrize("teacher", ["received", "self"])
def test_fedadc_plus_with_uniform_counts_is_fedadc(teacher: Any) -> None:
    rng = np.random.default_rng(0)
    even = from_clients([(rng.normal(size=(12, 5)), np.arange(12) % 4) for _ in range(4)])
    plus = FedADC(objective=SelfConfidence(lam=0.7, teacher=teacher))
    assert_equal(theta(plus, data=even), theta(FedADC(), data=even))


@dataclass(frozen=True, kw_only=True)
class Watched(FedADC):
    """FedADC that records every gradient it uses."""

    seen: list[torch.Tensor] = field(default_factory=list)

    def correct(self, g: Any, theta: Any, local: Any) -> Any:
        self.seen.append(g.clone())
        return g


def one_update(method: Method, m: torch.Tensor | None = None, client: int = 2) -> Any:
    torch.manual_seed(0)
    federation = Federation(model=Logistic((5,), 4).double(), data=small_federation(), method=method, local=WORK)
    state = federation.start()
    m = torch.randn(state.theta.shape, dtype=torch.float64) if m is None else m
    steps = int(steps_of(federation, np.array([client]))[0])
    return updated(federation, 1, 0.2, state.theta, client, steps, {"m": m}), m


@pytest.mark.parametrize("nesterov", [False, True])
def test_delta_identity(nesterov: bool) -> None:
    """The paper's equation after Algorithm 3: Delta = eta (sum of g + beta_local m)."""
    method = Watched(beta=0.9, beta_local=0.6, nesterov=nesterov)
    report, m = one_update(method)
    assert len(method.seen) == 2 * 4  # 13 samples in batches of 4, twice
    assert_equal(report.upload["delta"].numpy(), (0.2 * (sum(method.seen) + 0.6 * m)).numpy())


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("client", [0, 5])
def test_every_client_embeds_exactly_beta_m_whatever_its_h(nesterov: bool, client: int) -> None:
    flat = FedADC(beta=0.9, beta_local=0.6, nesterov=nesterov, objective=LinearLoss(scale=0.0))
    torch.manual_seed(0)
    federation = Federation(
        model=Logistic((5,), 4).double(), data=small_federation(), method=flat, local=replace(WORK, weight_decay=0.0)
    )
    start = federation.start().theta
    m = torch.randn(start.shape, dtype=torch.float64)
    steps = int(steps_of(federation, np.array([client]))[0])
    report = updated(federation, 1, 0.2, start, client, steps, {"m": m})
    assert_equal(report.upload["delta"].numpy(), (0.2 * 0.6 * m).numpy())


@pytest.mark.parametrize("server_lr", [1.0, 0.6])
@pytest.mark.parametrize("make", [SlowMo, FedADC, FedADCDouble])
def test_the_step_of_theta_is_alpha_lr_m(make: type[Method], server_lr: float) -> None:
    """theta_t - theta_{t+1} = alpha eta_t m_{t+1}, with the learning rate of the finished round."""
    method = make(beta=0.8, server_lr=server_lr)  # type: ignore[call-arg]
    torch.manual_seed(0)
    federation = Federation(
        model=MLP((5,), 4, [7]).double(), data=small_federation(), method=method, local=WORK, cohort=3
    )
    before, rates = federation.start().theta, set()
    for done in federation.rounds(5):
        after, m = done.state.theta, done.state.server["m"]
        assert_equal((before - after).numpy(), (server_lr * done.lr * m).numpy())
        before = after
        rates.add(done.lr)
    assert len(rates) == 5  # the schedule changed the learning rate


def test_beta_local_follows_beta_until_it_is_given() -> None:
    assert replace(FedADC(beta=0.9), beta=0.5).complete().beta_local == 0.5
    assert replace(FedADC(beta=0.9, beta_local=0.3), beta=0.5).complete().beta_local == 0.3


# At weight 0 a term is not computed at all. At a weight of nearly 0 its teacher, its masks and its state are computed,
# and must not change training.
NEUTRAL: dict[str, tuple[Method, int | None]] = {  # a method that must be FedAvg, and its projection head
    "fedprox": (FedProx(mu=0), None),
    "fedrs hard": (FedAvg(objective=RestrictedSoftmax(alpha=1)), None),
    "fedrs soft": (FedAvg(objective=RestrictedSoftmax(alpha=1, soft=True)), None),
    "fedgkd": (FedAvg(objective=GlobalDistillation(lam=0)), None),
    "fedgkd, window": (FedAvg(objective=GlobalDistillation(lam=0, window=3)), None),
    "fedgkd, nearly": (FedAvg(objective=GlobalDistillation(lam=1e-13, window=3)), None),
    "fedntd": (FedAvg(objective=NotTrueDistillation(beta=0)), None),
    "fedntd, nearly": (FedAvg(objective=NotTrueDistillation(beta=1e-13)), None),
    "moon": (FedAvg(objective=ModelContrast(mu=0)), 3),
    "moon, nearly": (FedAvg(objective=ModelContrast(mu=1e-13)), 3),
    "fedavgm": (FedAvgM(beta=0, server_lr=1), None),
}


@MOMENTA
@pytest.mark.parametrize(("method", "projection"), NEUTRAL.values(), ids=NEUTRAL)
def test_without_their_own_term_the_baselines_are_fedavg(
    method: Method, projection: int | None, momentum: float
) -> None:
    work = replace(WORK, momentum=momentum)
    assert_equal(theta(method, work, projection), theta(FedAvg(), work, projection))


ACTIVE: dict[str, tuple[Method, int | None]] = {
    "fedprox": (FedProx(mu=0.1), None),
    "fedrs hard": (FedAvg(objective=RestrictedSoftmax(alpha=0.5)), None),
    "fedrs soft": (FedAvg(objective=RestrictedSoftmax(alpha=0.5, soft=True)), None),
    "fedgkd": (FedAvg(objective=GlobalDistillation(lam=0.1)), None),
    "fedntd": (FedAvg(objective=NotTrueDistillation(beta=0.3)), None),
    "moon": (FedAvg(objective=ModelContrast(mu=1)), 3),
}


@pytest.mark.parametrize(("method", "projection"), ACTIVE.values(), ids=ACTIVE)
def test_with_their_own_term_the_baselines_differ_from_fedavg(method: Method, projection: int | None) -> None:
    assert np.abs(theta(method, WORK, projection) - theta(FedAvg(), WORK, projection)).max() > 1e-4


@MOMENTA
def test_hard_and_soft_restricted_softmax_are_equal_where_blocks_are_equal(momentum: float) -> None:
    """Then p_c / max p is 1 for the classes that a client holds, and 0 for the others."""
    rng = np.random.default_rng(0)
    data = from_arrays(rng.normal(size=(48, 5)), np.arange(48) % 4)  # 6 clients × 2 labels: 12 blocks of 4
    work, kw = replace(WORK, momentum=momentum), {"clients": 6, "partition": SortAndPartition(labels_per_client=2)}
    hard, soft = (
        theta(FedAvg(objective=RestrictedSoftmax(alpha=0.5, soft=soft)), work, data=data, **kw)
        for soft in (False, True)
    )
    assert_equal(hard, soft)


def test_restricted_softmax_differs_where_blocks_are_not_equal() -> None:
    hard, soft = (theta(FedAvg(objective=RestrictedSoftmax(alpha=0.5, soft=soft))) for soft in (False, True))
    assert np.abs(hard - soft).max() > 1e-3


EQUAL_STEPS = LocalWork(steps=5, batch_size=4, lr=0.2, weight_decay=0.01, clip=2.0, schedule=Cosine(final=0.2))


@MOMENTA
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_fednova_with_equal_steps_normalizes_nothing(momentum: float, weighting: str) -> None:
    work = replace(EQUAL_STEPS, momentum=momentum)
    for nova, plain in (
        (FedNova(), FedAvg()),
        (FedNova(mu=0.2), FedProx(mu=0.2)),
        (FedNova(beta=0.7, server_lr=0.8), SlowMo(beta=0.7, server_lr=0.8)),
    ):
        found, expected = (theta(method, work, weighting=weighting) for method in (nova, plain))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@MOMENTA
def test_fednova_with_one_client_is_its_local_sgd(momentum: float) -> None:
    alone: dict[str, Any] = {"work": replace(WORK, momentum=momentum), "partition": Pooled(), "cohort": None}
    np.testing.assert_allclose(theta(FedNova(), **alone), theta(FedAvg(), **alone), rtol=0, atol=1e-12)


def test_fednova_with_unequal_steps_is_not_fedavg() -> None:
    assert np.abs(theta(FedNova()) - theta(FedAvg())).max() > 1e-3


@MOMENTA
def test_on_constant_gradients_fednova_follows_their_mean_whatever_the_steps(momentum: float) -> None:
    """FedAvg follows the mean weighted by steps. With momentum, 1, 2 and 3 steps go 1, 2 + m and 3 + 2m + m² far."""
    x = torch.eye(3, dtype=torch.float64)
    clients = [(x[[k] * (k + 1)], torch.full((k + 1,), k)) for k in range(3)]  # 1, 2 and 3 samples
    data = from_clients(clients, test=(x, torch.tensor([0, 1, 2])))
    work = LocalWork(epochs=1, batch_size=1, lr=0.1, momentum=momentum)
    moves = {}
    for method in (FedNova(), FedAvg()):
        method = replace(method, objective=LinearLoss())
        module = torch.nn.Linear(3, 3, bias=False).double()
        federation = Federation(model=module, data=data, method=method, local=work, test=0)
        first = federation.start().theta.clone()
        moves[type(method)] = (first - next(iter(federation.rounds(1))).state.theta).view(3, 3).numpy()
    far = np.array([1, 2 + momentum, 3 + 2 * momentum + momentum**2])
    gradient = np.linspace(-1, 1, 3)[:, None] / 3 * np.ones(3)  # column k: of client k
    np.testing.assert_allclose(moves[FedNova], 0.1 * far.mean() * gradient / 3, rtol=0, atol=1e-14)
    np.testing.assert_allclose(moves[FedAvg], 0.1 * far * gradient / 3, rtol=0, atol=1e-14)


def test_fednova_refuses_a_mu_beyond_which_its_norm_is_not_known() -> None:
    with pytest.raises(FedadcError, match=r"mu of at most .* here 1\.25; lower mu"):
        trained(FedNova(mu=1.3), LocalWork(lr=0.2, momentum=0.25))


def test_scaffold_with_one_client_is_fedavg() -> None:
    """Then c = c_k after every round, and the correction is zero; also while the learning rate changes."""
    alone: dict[str, Any] = {"partition": Pooled(), "cohort": None}
    scaffold = trained(Scaffold(server_lr=1), **alone)
    assert_equal(scaffold.state.theta.numpy(), theta(FedAvg(), **alone))
    assert float(scaffold.state.server["c"].abs().max()) > 1e-3


def test_scaffold_with_several_clients_is_not_fedavg() -> None:
    assert np.abs(theta(Scaffold()) - theta(FedAvg())).max() > 1e-2


@MOMENTA
@pytest.mark.parametrize("server_lr", [1.0, 0.4])
def test_fedavgm_is_slowmo_while_the_learning_rate_stays_the_same(server_lr: float, momentum: float) -> None:
    """SlowMo's m is FedAvgM's over lr, and it moves by server_lr lr m."""
    work = LocalWork(epochs=2, batch_size=4, lr=0.2, weight_decay=0.01, clip=2.0, momentum=momentum)
    fedavgm, slowmo = (trained(make(beta=0.8, server_lr=server_lr), work).state for make in (FedAvgM, SlowMo))
    assert_equal(fedavgm.theta.numpy(), slowmo.theta.numpy())
    assert_equal(fedavgm.server["m"].numpy(), 0.2 * slowmo.server["m"].numpy())


def test_fedavgm_is_not_slowmo_while_the_learning_rate_changes() -> None:
    assert np.abs(theta(FedAvgM(beta=0.8)) - theta(SlowMo(beta=0.8))).max() > 1e-3


HUGE = 1e6  # tau: v starts at tau², beside which a squared delta d² does not count


@MOMENTA
@pytest.mark.parametrize(
    "adaptive",
    [
        FedAdagrad(beta1=0.7, tau=HUGE, server_lr=2 * HUGE),
        FedYogi(beta1=0.7, beta2=0.9, tau=HUGE, server_lr=2 * HUGE),
        FedAdam(beta1=0.7, beta2=1 - 1e-13, tau=HUGE, server_lr=2 * HUGE),  # else its v decays: the next test
    ],
)
def test_with_a_huge_tau_adaptive_methods_are_fedavgm(adaptive: Method, momentum: float) -> None:
    """sqrt(v) + tau = 2 tau to a relative d² / 4 tau² (about 1e-13 here), so theta moves by server_lr / 2 tau m = m.

    Their m is an average, 1 - beta1 times FedAvgM's sum.
    """
    work = replace(WORK, momentum=momentum)
    assert_equal(theta(adaptive, work), theta(FedAvgM(beta=0.7, server_lr=1 - 0.7), work))


@MOMENTA
def test_with_a_huge_tau_and_no_momentum_fedadagrad_is_fedavg(momentum: float) -> None:
    work = replace(WORK, momentum=momentum)
    assert_equal(theta(FedAdagrad(tau=HUGE, server_lr=2 * HUGE), work), theta(FedAvg(), work))


def test_with_a_huge_tau_fedadams_v_still_decays() -> None:
    """v = beta2^t tau², so that round t moves theta by server_lr / (1 + beta2^(t/2)) tau m."""
    rounds = run(FedAdam(beta1=0.7, beta2=0.9, tau=HUGE, server_lr=HUGE))
    for before, after in pairwise(rounds):
        step = after.state.server["m"] / (1 + 0.9 ** (after.round / 2))
        assert_equal((before.state.theta - after.state.theta).numpy(), step.numpy())


@pytest.mark.parametrize("tau", [1e-8, 1e-10])
def test_without_memory_or_tau_fedadam_takes_the_sign(tau: float) -> None:
    """d / (|d| + tau) misses sign(d) by less than tau / |d|."""
    start, fedavg, signed = (
        run(method, model=Logistic)[0].state.theta
        for method in (Still(), FedAvg(), FedAdam(beta1=0, beta2=0, tau=tau, server_lr=0.01))
    )
    delta = start - fedavg
    assert float(delta.abs().min()) > 1e-4
    np.testing.assert_allclose((start - signed).numpy(), 0.01 * delta.sign().numpy(), rtol=tau / 1e-4, atol=0)


@MOMENTA
def test_the_window_of_global_models_is_open_from_the_second_round(momentum: float) -> None:
    """There is one global model in the first round, two in the second, three in the third."""
    work = replace(WORK, momentum=momentum)
    one, two, three = (
        [done.state.theta for done in run(FedAvg(objective=GlobalDistillation(lam=0.5, window=m)), work)]
        for m in (1, 2, 3)
    )
    assert torch.equal(one[0], two[0]) and torch.equal(two[0], three[0])
    assert float((one[1] - two[1]).abs().max()) > 1e-4 and torch.equal(two[1], three[1])
    assert float((two[2] - three[2]).abs().max()) > 1e-5


@dataclass(frozen=True, kw_only=True)
class Still(FedAvg):
    """A server that never moves: all its global models are the same."""

    def update(self, theta: Any, server: Any, mean: Any, info: Any) -> Any:
        return theta, server


@MOMENTA
@pytest.mark.parametrize("window", [2, 3])
def test_a_window_of_equal_models_is_the_received_one(window: int, momentum: float) -> None:
    losses = []  # what the clients did is seen in their losses alone
    for m in (1, window):
        rounds = run(Still(objective=GlobalDistillation(lam=0.5, window=m)), replace(WORK, momentum=momentum))
        losses.append([done.train_loss for done in rounds])
    assert torch.equal(rounds[-1].state.theta, rounds[0].state.theta)
    assert_equal(np.array(losses[0]), np.array(losses[1]))


@MOMENTA
def test_feddyns_first_mean_model_is_fedproxs(momentum: float) -> None:
    """No h_k yet: the local objective is f_k + alpha/2 |theta - theta_t|²."""
    work, method = replace(WORK, momentum=momentum), FedDyn(alpha=0.3)
    dyn, prox = run(method, work)[0].state, run(FedProx(mu=0.3), work)[0].state
    assert_equal(method.evaluated(dyn.theta, dyn.server)["mean"].numpy(), prox.theta.numpy())
    assert np.abs(dyn.theta.numpy() - prox.theta.numpy()).max() > 1e-3


def test_feddyn_by_size_is_feddyn_for_equal_sizes() -> None:
    rng = np.random.default_rng(0)
    even = from_clients([(rng.normal(size=(12, 5)), rng.integers(4, size=12)) for _ in range(4)])
    assert_equal(theta(FedDyn(alpha_by_size=True), data=even), theta(FedDyn(), data=even))
    assert np.abs(theta(FedDyn(alpha_by_size=True)) - theta(FedDyn())).max() > 1e-4


def test_weighting_by_samples_never_touches_scaffolds_c() -> None:
    """From the same state c takes the same bits; over rounds it stays the plain mean over all 6 clients."""
    uniform, weighted = (run(Scaffold(), weighting=w) for w in ("uniform", "samples"))
    assert torch.equal(uniform[0].state.server["c"], weighted[0].state.server["c"])
    assert float((uniform[0].state.theta - weighted[0].state.theta).abs().max()) > 1e-4
    for done in weighted:
        total = sum(own["c"] for own in done.state.clients.values())
        np.testing.assert_allclose(done.state.server["c"].numpy(), total / 6, rtol=0, atol=1e-12)
