"""What must equal what, in float64, on a model with one hidden layer, unequal clients and partial participation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import small_federation
from fedadc.data import from_clients
from fedadc.errors import FedadcError
from fedadc.federation.federation import Federation
from fedadc.federation.local import Broadcast, LocalWork, Order, local_update
from fedadc.federation.rounds import Round
from fedadc.federation.schedule import Cosine
from fedadc.methods import FedADC, FedADCDouble, FedAvg, Method, SlowMo
from fedadc.models import MLP, Logistic
from fedadc.objectives import Objective, SelfConfidence

WORK = LocalWork(epochs=2, batch_size=4, lr=0.2, weight_decay=0.01, clip=2.0, schedule=Cosine(final=0.2))


def trained(method: Method, work: LocalWork = WORK, model: Any = None, data: Any = None) -> Round:
    torch.manual_seed(0)
    module = Logistic((5,), 4) if model is Logistic else MLP((5,), 4, hidden=[7])
    federation = Federation(
        model=module.double(), data=data or small_federation(), method=method, local=work, cohort=3, seed=5
    )
    return list(federation.rounds(5))[-1]


def theta(*args: Any, **kwargs: Any) -> np.ndarray:
    return trained(*args, **kwargs).state.theta.numpy()


def assert_equal(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


@dataclass(frozen=True, kw_only=True)
class LinearLoss(Objective):
    """Linear in theta for a linear model: its gradient is the same everywhere."""

    scale: float = 1.0

    def __call__(self, model: Any, batch: Any, local: Any) -> torch.Tensor:
        return self.scale * (model(batch.x) * torch.linspace(-1, 1, 4, dtype=torch.float64)).mean()


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
    """FedADC that keeps every gradient it used."""

    seen: list[torch.Tensor] = field(default_factory=list)

    def correct(self, g: Any, theta: Any, local: Any) -> Any:
        self.seen.append(g.clone())
        return g


def one_update(method: Method, m: torch.Tensor | None = None, client: int = 2) -> Any:
    torch.manual_seed(0)
    federation = Federation(model=Logistic((5,), 4).double(), data=small_federation(), method=method, local=WORK)
    state = federation.start()
    m = torch.randn(state.theta.shape, dtype=torch.float64) if m is None else m
    place = federation.workplace
    order = Order(client, int(place.steps(np.array([client]))[0]), None)
    return local_update(place, Broadcast(1, 0.2, state.theta, {"m": m}), order), m


@pytest.mark.parametrize("nesterov", [False, True])
def test_delta_identity(nesterov: bool) -> None:
    """The paper's equation after Algorithm 3: Delta = eta (sum of g + beta_local m)."""
    method = Watched(beta=0.9, beta_local=0.6, nesterov=nesterov)
    report, m = one_update(method)
    assert len(method.seen) == report.steps
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
    place = federation.workplace
    order = Order(client, int(place.steps(np.array([client]))[0]), None)
    report = local_update(place, Broadcast(1, 0.2, start, {"m": m}), order)
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
    assert len(rates) == 5  # the schedule did change it


def test_beta_local_follows_beta_until_it_is_given() -> None:
    assert replace(FedADC(beta=0.9), beta=0.5).complete().beta_local == 0.5
    assert replace(FedADC(beta=0.9, beta_local=0.3), beta=0.5).complete().beta_local == 0.3
