"""Methods and objectives against results derived by hand: optima from normal equations, and single rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conftest import slow, small_federation
from fedadc.data import Dataset, from_clients
from fedadc.data.batches import shuffled
from fedadc.data.dataset import Samples
from fedadc.federation import Federation
from fedadc.methods import (
    Ditto,
    FedAdagrad,
    FedAdam,
    FedADC,
    FedADCDouble,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedDyn,
    FedPer,
    FedProx,
    FedRep,
    FedYogi,
    LocalOnly,
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
from fedadc.partitions import Pooled
from fedadc.rng import generator
from fedadc.training.state import Round, RunState
from fedadc.views.local_work import LocalWork

LN2 = math.log(2)

# Heterogeneous quadratics: least squares on one-hot labels. With X a client's inputs and a column of ones, Y its
# one-hot labels and theta the weights on top of the bias, f_k = |X theta - Y|² / 2n + wd/2 |theta|² has the gradient
# A_k theta - B_k, A_k = X'X/n + wd I, B_k = X'Y/n. Curvature and optimum differ from client to client.
CLIENTS, FEATURES, CLASSES = 3, 2, 2
STEPS, LR = 4, 0.2


@dataclass(frozen=True, kw_only=True)
class SquaredError(Objective):
    def __call__(self, model: Any, batch: Any, local: Any) -> torch.Tensor:
        error = model(batch.x) - nn.functional.one_hot(batch.y, CLASSES)
        return 0.5 * error.square().sum(dim=1).mean()


def shares() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    made = []
    for k in range(CLIENTS):
        n = 5 + 4 * k
        x = rng.normal(size=(n, FEATURES)) * (0.6 + 0.5 * k) + 0.5 * rng.normal(size=FEATURES)
        y = (x @ rng.normal(size=FEATURES) > (-1) ** k / 2).astype(np.int64)
        made.append((x, y))
    return made


SIZES = np.array([len(y) for _, y in shares()], dtype=float)


def normal_equations(weight_decay: float) -> tuple[np.ndarray, np.ndarray]:
    """A_k and B_k of all clients."""
    a, b = [], []
    for x, y in shares():
        x = np.column_stack([x, np.ones(len(x))])
        a.append(x.T @ x / len(x) + weight_decay * np.eye(FEATURES + 1))
        b.append(x.T @ np.eye(CLASSES)[y] / len(x))
    return np.array(a), np.array(b)


def solved(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The root of the mean gradient, as one flat vector: the weights [class, feature], then the biases."""
    theta = np.linalg.solve(a.mean(axis=0), b.mean(axis=0))
    return np.concatenate([theta[:-1].T.ravel(), theta[-1]])


def optimum(weight_decay: float, weights: np.ndarray | None = None) -> np.ndarray:
    a, b = normal_equations(weight_decay)
    w = np.ones(CLIENTS) if weights is None else weights / weights.mean()
    return solved(w[:, None, None] * a, w[:, None, None] * b)


def fixed_point(weight_decay: float, steps: int, mu: float = 0.0) -> np.ndarray:
    """The point to which FedProx converges; FedAvg at mu = 0.

    In steps of gradient A_k theta - B_k + mu (theta - theta_t) the gradient shrinks by I - lr M_k each time, with
    M_k = A_k + mu I, so that a round moves a client by -P_k (A_k theta_t - B_k), P_k = lr sum_{j<H} (I - lr M_k)^j. The
    mean does not move where sum_k P_k (A_k theta - B_k) = 0: the optimum if all P_k are equal, as for H = 1.
    """
    a, b = normal_equations(weight_decay)
    one = np.eye(FEATURES + 1)
    p = [sum(LR * np.linalg.matrix_power(one - LR * (m + mu * one), j) for j in range(steps)) for m in a]
    return solved(p @ a, p @ b)


def quadratics(
    method: Method, weight_decay: float = 0.0, cohort: int = CLIENTS, steps: int = STEPS, rounds: int = 100
) -> dict[str, np.ndarray]:
    """The evaluated models after training on full batches."""
    state = trained_on_quadratics(method, weight_decay, cohort, steps, rounds)
    return {name: v.numpy() for name, v in method.evaluated(state.theta, state.server).items()}


def trained_on_quadratics(method: Method, weight_decay: float, cohort: int, steps: int, rounds: int) -> RunState:
    torch.manual_seed(0)
    federation = Federation(
        test=0,
        model=Logistic((FEATURES,), CLASSES).double(),
        data=from_clients(shares()),
        method=replace(method, objective=SquaredError()),
        local=LocalWork(steps=steps, batch_size=int(SIZES.max()), lr=LR, weight_decay=weight_decay),
        cohort=cohort,
    )
    return list(federation.rounds(rounds))[-1].state


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("cohort", [CLIENTS, 2])
@pytest.mark.parametrize("method", [FedDyn(alpha=1.0), FedDyn(alpha=2.0), Scaffold()])
def test_drift_free_methods_reach_the_optimum_of_the_unweighted_mean(
    method: Method, cohort: int, weight_decay: float
) -> None:
    """FedDyn converged: h_k is constant, so theta_k = theta_t and grad f_k = h_k; so is theta, so h = mean h_k = 0.

    SCAFFOLD converged: c_k = grad f_k(theta), and every step goes along c = mean c_k, which must be 0.
    """
    models = quadratics(method, weight_decay, cohort)
    assert set(models) == ({"mean", "server"} if isinstance(method, FedDyn) else {"global"})
    for model in models.values():
        assert distance(model, optimum(weight_decay)) < 1e-10


@pytest.mark.parametrize("cohort", [CLIENTS, 2])
def test_feddyn_by_size_reaches_the_optimum_of_the_mean_weighted_by_samples(cohort: int) -> None:
    """h_k sums alpha_k times its client's deltas, h sums alpha/N times all: h = (1/N) sum_k (alpha/alpha_k) h_k.

    With alpha/alpha_k = n_k / mean(n) this is sum_k n_k h_k / sum_k n_k. Converged, h = 0 and h_k = grad f_k as above:
    the mean of the gradients weighted by samples is zero.
    """
    weighted = optimum(0.1, SIZES)
    for model in quadratics(FedDyn(alpha=2.0, alpha_by_size=True), 0.1, cohort).values():
        assert distance(model, weighted) < 1e-10
    assert distance(weighted, optimum(0.1)) > 0.05


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("method", "mu"), [(FedAvg(), 0.0), (FedProx(mu=0.5), 0.5)])
def test_drifting_methods_converge_to_another_point(method: Method, mu: float, weight_decay: float) -> None:
    reached = quadratics(method, weight_decay)["global"]
    assert distance(reached, fixed_point(weight_decay, STEPS, mu)) < 1e-10
    assert distance(reached, optimum(weight_decay)) > 0.05


@pytest.mark.parametrize(("method", "mu"), [(FedAvg(), 0.0), (FedProx(mu=0.5), 0.5)])
def test_one_local_step_has_no_drift(method: Method, mu: float) -> None:
    assert distance(fixed_point(0.1, 1, mu), optimum(0.1)) < 1e-12
    assert distance(quadratics(method, 0.1, steps=1, rounds=150)["global"], optimum(0.1)) < 1e-10


@pytest.mark.parametrize(
    ("lam", "weight_decay"), [(0.0, 0.1), slow(0.0, 0.0), (0.5, 0.1), slow(0.5, 0.0), slow(4.0, 0.1), (4.0, 0.0)]
)
def test_dittos_own_models_converge_between_the_clients_optimum_and_the_global_model(
    lam: float, weight_decay: float
) -> None:
    """v_k minimizes f_k + lam/2 |v - theta|²: (A_k + lam I) v_k = B_k + lam theta, theta being FedAvg's limit."""
    state = trained_on_quadratics(Ditto(lam=lam), weight_decay, CLIENTS, STEPS, rounds=250 if lam else 400)
    theta = fixed_point(weight_decay, STEPS)
    assert distance(state.theta.numpy(), theta) < 1e-10
    weights, bias = theta[:-CLASSES].reshape(CLASSES, FEATURES), theta[-CLASSES:]
    pull = lam * np.vstack([weights.T, bias])
    for k, (a, b) in enumerate(zip(*normal_equations(weight_decay), strict=True)):
        limit = solved((a + lam * np.eye(FEATURES + 1))[None], (b + pull)[None])
        assert distance(state.clients[k]["model"].numpy(), limit) < 1e-10
        assert distance(limit, theta) > 1e-3


# A tiny run, small enough to compute by hand: one parameter, f = a/2 (theta - b)², from theta = 1 with lr = 1/4.
#   client 0: one sample, a = 1, b = 5, gradient theta - 5, H = 1
#   client 1: two equal samples, a = 2, b = -1, gradient 2 theta + 2, H = 2
# A plain round, which most examples below extend:
#   client 0: g = -4, theta = 2;                          delta = -1
#   client 1: g = 4, theta = 0; g = 2, theta = -1/2;      delta = 3/2
TINY = from_clients([([[1.0, 5.0]], [0]), ([[2.0, -1.0]] * 2, [0, 1])])


class Scalar(nn.Module):
    """theta - b, once for each of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.theta - x[:, 1:]).expand(-1, 2)


@dataclass(frozen=True, kw_only=True)
class Parabola(Objective):
    def __call__(self, model: Any, batch: Any, local: Any) -> torch.Tensor:
        return 0.5 * (batch.x[:, 0] * model(batch.x)[:, 0] ** 2).mean()


def tiny_run(
    method: Method, rounds: int = 1, momentum: float = 0.0, weighting: Any = "uniform", **server: float
) -> Round:
    """The last of `rounds` rounds from theta = 1, with the given server vectors (else the method's own)."""
    federation = Federation(
        test=0,
        model=Scalar(),
        data=TINY,
        method=replace(method, objective=Parabola()),
        local=LocalWork(epochs=1, batch_size=1, lr=0.25, momentum=momentum),
        weighting=weighting,
    )
    start = federation.start()
    given = {name: torch.tensor([value], dtype=torch.float64) for name, value in server.items()}
    assert given.keys() <= start.server.keys()
    return list(federation.rounds(rounds, replace(start, server={**start.server, **given})))[-1]


def assert_state(state: RunState, theta: float, **server: float) -> None:
    """Compare everything that the server has: theta and all of its vectors."""
    seen = {"theta": state.theta, **state.server}
    assert {name: v.item() for name, v in seen.items()} == pytest.approx({"theta": theta, **server}, abs=1e-14)


def own(state: RunState, name: str) -> list[float]:
    return [state.clients[k][name].item() for k in range(2)]


def test_fedavg() -> None:
    """Mean delta (-1 + 3/2) / 2 = 1/4; by samples (-1 · 1 + 3/2 · 2) / 3 = 2/3."""
    assert_state(tiny_run(FedAvg()).state, 1 - 1 / 4)
    assert_state(tiny_run(FedAvg(), weighting="samples").state, 1 - 2 / 3)


def test_fedavg_with_local_momentum() -> None:
    """Momentum 1/2 changes client 1's second step: v = 4/2 + 2 = 4, theta = -1, delta = 2. Mean (-1 + 2) / 2."""
    assert_state(tiny_run(FedAvg(), momentum=0.5).state, 1 - 1 / 2)


def test_slowmo() -> None:
    """m = 4/2 + (1/4)/(1/4) = 3, theta = 1 - 1/2 · 1/4 · 3."""
    assert_state(tiny_run(SlowMo(beta=0.5, server_lr=0.5), m=4).state, 1 - 3 / 8, m=3)


def test_fedadc_heavy_ball() -> None:
    """m = 2, beta_local = 1/2: m_bar = 1 at client 0 (H = 1), 1/2 at client 1 (H = 2).

    client 0: theta = 1 - (-4 + 1)/4 = 7/4, delta = -3/4
    client 1: theta = 1 - (4 + 1/2)/4 = -1/8; g = 7/4, theta = -1/8 - (7/4 + 1/2)/4 = -11/16, delta = 27/16
    server: mean delta = 15/32, over lr 15/8; m = 15/8 + (3/4 - 1/2) 2 = 19/8; theta = 1 - 1/2 · 1/4 · 19/8
    """
    method = FedADC(beta=0.75, beta_local=0.5, server_lr=0.5)
    assert_state(tiny_run(method, m=2).state, 1 - 19 / 64, m=19 / 8)


def test_fedadc_nesterov() -> None:
    """As above, but the gradient is taken after the momentum has moved the model.

    client 0: half = 1 - 1/4 = 3/4; g = -17/4, theta = 3/4 + 17/16 = 29/16, delta = -13/16
    client 1: half = 1 - 1/8 = 7/8; g = 15/4, theta = 7/8 - 15/16 = -1/16;
              half = -1/16 - 1/8 = -3/16; g = 13/8, theta = -3/16 - 13/32 = -19/32, delta = 51/32
    server: mean delta = 25/64, over lr 25/16; m = 25/16 + 1/2 = 33/16; theta = 1 - 1/2 · 1/4 · 33/16
    """
    method = FedADC(beta=0.75, beta_local=0.5, server_lr=0.5, nesterov=True)
    assert_state(tiny_run(method, m=2).state, 1 - 33 / 128, m=33 / 16)


def test_fedadc_double_momentum() -> None:
    """m = 2, beta = 1/2 as in heavy-ball, and the client's own average with phi = 1/2, which starts at g.

    client 0: m_0 = -4, theta = 1 - (1 - 4)/4 = 7/4, delta = -3/4
    client 1: m_1 = 4, theta = 1 - (1/2 + 4)/4 = -1/8;
              g = 7/4, m_1 = 4/2 + 7/8 = 23/8, theta = -1/8 - (1/2 + 23/8)/4 = -31/32, delta = 63/32
    server: mean delta = 39/64, m = 39/16 with one beta, theta = 1 - 1/2 · 1/4 · 39/16
    """
    assert_state(tiny_run(FedADCDouble(beta=0.5, phi=0.5, server_lr=0.5), m=2).state, 1 - 39 / 128, m=39 / 16)


def test_fedprox() -> None:
    """mu = 1/2. No pull in the first step. Client 1's second: 2 + (0 - 1)/2 = 3/2, theta = -3/8, delta = 11/8.

    Mean delta (-1 + 11/8) / 2 = 3/16.
    """
    assert_state(tiny_run(FedProx(mu=0.5)).state, 1 - 3 / 16)


def test_ditto_two_rounds() -> None:
    """lam = 1/2. theta is FedAvg's; in round 1 v is FedProx's, mu = lam: 2 and -3/8. Then theta_t = 3/4.

    Round 2, client 0: g = 2 - 5 + 1/2 (2 - 3/4) = -19/8, v = 2 + 19/32
      client 1: g = -3/4 + 2 + 1/2 (-3/8 - 3/4) = 11/16, v = -3/8 - 11/64 = -35/64;
                g = -35/32 + 2 + 1/2 (-35/64 - 3/4) = 33/128, v = -35/64 - 33/512
    """
    first, second = (tiny_run(Ditto(lam=0.5), rounds).state for rounds in (1, 2))
    assert_state(first, 3 / 4)
    assert own(first, "model") == pytest.approx([2, -3 / 8], abs=1e-14)
    assert_state(second, tiny_run(FedAvg(), 2).state.theta.item())
    assert own(second, "model") == pytest.approx([83 / 32, -313 / 512], abs=1e-14)


def test_feddyn_two_rounds() -> None:
    """alpha = 1/2. Round 1 has h_k = 0 and is FedProx's, mu = alpha: deltas -1 and 11/8.

    h_0 = -1/2, h_1 = 11/16, h = 1/2 · 1/2 (-1 + 11/8) = 3/32; mean model 13/16, theta = 13/16 - 2 · 3/32 = 5/8
    Round 2, client 0: g = 5/8 - 5 + 1/2 = -31/8, theta = 5/8 + 31/32 = 51/32, delta = -31/32, h_0 = -1/2 - 31/64
      client 1: g = 5/4 + 2 - 11/16 = 41/16, theta = 5/8 - 41/64 = -1/64;
                g = -1/32 + 2 - 11/16 + 1/2 (-1/64 - 5/8) = 123/128, theta = -1/64 - 123/512 = -131/512,
                delta = 320/512 + 131/512 = 451/512, h_1 = 11/16 + 451/1024
      h = 3/32 + 1/4 (-31/32 + 451/512) = 147/2048; mean model (816 - 131)/1024 = 685/1024, theta = mean - 2h = 538/1024
    """
    method = FedDyn(alpha=0.5)
    first, second = tiny_run(method).state, tiny_run(method, rounds=2).state
    assert_state(first, 5 / 8, h=3 / 32)
    assert own(first, "h") == pytest.approx([-1 / 2, 11 / 16], abs=1e-14)
    assert_state(second, 538 / 1024, h=147 / 2048)
    assert own(second, "h") == pytest.approx([-63 / 64, 1155 / 1024], abs=1e-14)
    models = {name: v.item() for name, v in method.evaluated(second.theta, second.server).items()}
    assert models == pytest.approx({"mean": 685 / 1024, "server": 538 / 1024}, abs=1e-14)


def test_feddyn_by_size() -> None:
    """mean(n) = 3/2, so alpha_0 = 1/2 · 3/2 / 1 = 3/4 and alpha_1 = 1/2 · 3/2 / 2 = 3/8.

    client 0: delta = -1, h_0 = -3/4
    client 1: second step 2 + 3/8 (0 - 1) = 13/8, theta = -13/32, delta = 45/32, h_1 = 3/8 · 45/32 = 135/256
    h = 1/4 (-1 + 45/32) = 13/128 = (1 h_0 + 2 h_1) / 3; mean model (2 - 13/32)/2 = 51/64, theta = 51/64 - 13/64
    """
    state = tiny_run(FedDyn(alpha=0.5, alpha_by_size=True)).state
    assert_state(state, 38 / 64, h=13 / 128)
    assert own(state, "h") == pytest.approx([-3 / 4, 135 / 256], abs=1e-14)


def test_scaffold_two_rounds() -> None:
    """Round 1 has c = c_k = 0. c_0 = -1/(1/4) = -4, c_1 = 3/2 / (2/4) = 3, c = -1/2; theta = 1 - 2 · 1/4 = 1/2.

    Round 2, client 0: -9/2 + 4 - 1/2 = -1, theta = 3/4, delta = -1/4; c_0 = -4 + 1/2 - 1 = -9/2, its gradient
      client 1: 3 - 3 - 1/2 = -1/2, theta = 5/8; 13/4 - 7/2 = -1/4, theta = 11/16, delta = -3/16;
                c_1 = 3 + 1/2 - 3/8 = 25/8, the mean of its gradients 3 and 13/4
      c = -1/2 + (-1/2 + 1/8)/2 = -11/16; theta = 1/2 + 2 · 7/32 = 15/16
    """
    first, second = (tiny_run(Scaffold(server_lr=2.0), rounds).state for rounds in (1, 2))
    assert_state(first, 1 / 2, c=-1 / 2)
    assert own(first, "c") == pytest.approx([-4, 3], abs=1e-14)
    assert_state(second, 15 / 16, c=-11 / 16)
    assert own(second, "c") == pytest.approx([-9 / 2, 25 / 8], abs=1e-14)


def test_fedavgm() -> None:
    """m = 2/2 + 1/4 = 5/4: not divided by lr, not averaged. theta = 1 - 1/2 · 5/4."""
    assert_state(tiny_run(FedAvgM(beta=0.5, server_lr=0.5), m=2).state, 3 / 8, m=5 / 4)


def test_fedadam() -> None:
    """d = 1/4. First round, tau = 1/4: m = d/2 = 1/8, not corrected for its start; v = 3/4 tau² + 1/4 d² = 1/16.

    theta = 1 - 1/2 · 1/8 / (1/4 + 1/4) = 7/8. From m = v = 1, tau = 1/8: m = 1/2 + 1/8 = 5/8,
    v = 3/4 + 1/4 · 1/16 = 49/64, theta = 1 - 1/2 · 5/8 / (7/8 + 1/8).
    """
    method = FedAdam(beta1=0.5, beta2=0.75, tau=0.25, server_lr=0.5)
    assert_state(tiny_run(method).state, 7 / 8, m=1 / 8, v=1 / 16)
    assert_state(tiny_run(replace(method, tau=0.125), m=1, v=1).state, 11 / 16, m=5 / 8, v=49 / 64)


@pytest.mark.parametrize("v", [3 / 64, 5 / 64])
def test_fedyogi(v: float) -> None:
    """d² = 4/64 and 1 - beta2 = 1/4: v moves by 1/64 toward d², up from 3/64 and down from 5/64, so sqrt(v) = 1/4.

    m = 1/2 + 1/8 = 5/8, theta = 1 - 1/2 · 5/8 / (1/4 + 1/4).
    """
    method = FedYogi(beta1=0.5, beta2=0.75, tau=0.25, server_lr=0.5)
    assert_state(tiny_run(method, m=1, v=v).state, 3 / 8, m=5 / 8, v=4 / 64)


def test_fedyogi_starts_at_tau_squared() -> None:
    """v = tau² = 1/4 is above d² = 1/16, so v = 1/4 - 1/4 · 1/16 = 15/64; m = 1/8.

    theta = 1 - 1/2 · 1/8 / (sqrt(v) + 1/2).
    """
    method = FedYogi(beta1=0.5, beta2=0.75, tau=0.5, server_lr=0.5)
    assert_state(tiny_run(method).state, 1 - 1 / 16 / (math.sqrt(15) / 8 + 1 / 2), m=1 / 8, v=15 / 64)


def test_fedadagrad() -> None:
    """beta1 = 0: m = d = 1/4. From v = 5/64, v = 5/64 + 4/64, theta = 1 - 1/2 · 1/4 / (3/8 + 1/8).

    First round, tau² = 1/64: v = 1/64 + 4/64, theta = 1 - 1/2 · 1/4 / (sqrt(5)/8 + 1/8).
    """
    method = FedAdagrad(tau=0.125, server_lr=0.5)
    assert_state(tiny_run(method, v=5 / 64).state, 3 / 4, m=1 / 4, v=9 / 64)
    assert_state(tiny_run(method).state, 1 - 1 / (math.sqrt(5) + 1), m=1 / 4, v=5 / 64)


def test_local_only_two_rounds() -> None:
    """Each continues its own model: client 0 from 2 with -3/4 · -1, client 1 from -1/2 with gradients 1 and 1/2."""
    done = tiny_run(LocalOnly(), rounds=2)
    assert_state(done.state, 1)
    assert own(done.state, "model") == pytest.approx([2 + 3 / 4, -1 / 2 - 1 / 4 - 1 / 8], abs=1e-14)
    assert done.bytes_up == done.bytes_down == 0


# Losses: the model is its three logits, whatever the input, so that the gradient of the cross-entropy is p - onehot;
# logits and learning rates are multiples of ln 2, so that every probability is a fraction. One client.
class Logits(nn.Module):
    def __init__(self, start: Sequence[float]) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.theta  # the inputs are 0


def blind(labels: Sequence[int], owners: Sequence[int], classes: int) -> Dataset:
    """Samples whose inputs are all 0, and a test sample of class 0."""
    x, y = torch.zeros(len(labels), 1, dtype=torch.float64), torch.tensor(labels)
    names = tuple(str(c) for c in range(classes))
    return Dataset("blind", Samples(x, y), names, Samples(x[:1], torch.tensor([0])), owners=np.array(owners))


def logits_of(objective: Objective, start: Sequence[float], labels: Sequence[int], work: LocalWork) -> Federation:
    data = blind(labels, [0] * len(labels), classes=3)
    return Federation(test=0, model=Logits(start), data=data, method=FedAvg(objective=objective), local=work)


def last(federation: Federation, rounds: int = 1) -> np.ndarray:
    return list(federation.rounds(rounds))[-1].state.theta.numpy()


def assert_vector(seen: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(seen), np.asarray(expected), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("soft", "scale", "p"),
    [
        (False, (1, 1, 1 / 2), (1 / 11, 8 / 11, 2 / 11)),
        (True, (1, 2 / 3, 1 / 2), (1 / 7, 4 / 7, 2 / 7)),
    ],
)
def test_restricted_softmax(soft: bool, scale: tuple[float, ...], p: tuple[float, ...]) -> None:
    """Labels 0, 0, 0, 1, alpha = 1/2, logits (0, 3, 2) ln 2, one step of the full batch with lr = 1.

    Hard: the absent class 2 counts half, logits (0, 3, 1) ln 2, p = (1, 8, 2)/11.
    Soft: shares (1, 1/3, 0) of the most frequent class scale by (1, 2/3, 1/2), logits (0, 2, 1) ln 2, p = (1, 4, 2)/7.
    The gradient is scale · (p - onehot), the mean of the one-hot labels being (3/4, 1/4, 0). Evaluation does not
    scale: p = (1, 8, 4)/13, so that the loss of a sample of class 0 is ln 13.
    """
    start = np.array([0, 3, 2]) * LN2
    work = LocalWork(steps=1, batch_size=4, lr=1.0)
    federation = logits_of(RestrictedSoftmax(alpha=0.5, soft=soft), start.tolist(), [0, 0, 0, 1], work)
    assert_vector(last(federation), start - np.array(scale) * (np.array(p) - [3 / 4, 1 / 4, 0]))
    assert federation.evaluator(federation.start())["test_loss"] == pytest.approx(math.log(13), abs=1e-14)


@pytest.mark.parametrize(("tau", "teacher"), [(1.0, (1 / 3, 2 / 3)), (0.5, (1 / 5, 4 / 5))])
def test_not_true_distillation(tau: float, teacher: tuple[float, float]) -> None:
    """Label 0, logits (0, 0, 1) ln 2, beta = 0.3, two steps with lr = 4 ln 2.

    Step 1: p = (1, 1, 2)/4, student = teacher: g = (-3/4, 1/4, 1/2), logits (3, -1, -1) ln 2.
    Step 2: p = (16, 1, 1)/18. Of the classes 1 and 2 the student says (1/2, 1/2), the teacher (1, 2^(1/tau)) over its
    sum. tau² KL(teacher || student) has the gradient tau (student - teacher) there and 0 at the true class.
    """
    work = LocalWork(steps=2, batch_size=1, lr=4 * LN2)
    federation = logits_of(NotTrueDistillation(beta=0.3, tau=tau), [0, 0, LN2], [0], work)
    distilled = 0.3 * tau * np.array([0, 1 / 2 - teacher[0], 1 / 2 - teacher[1]])
    g = np.array([-1 / 9, 1 / 18, 1 / 18]) + distilled
    assert_vector(last(federation), LN2 * np.array([3, -1, -1]) - 4 * LN2 * g)


def test_self_confidence() -> None:
    """FedADC+'s loss: labels 0, 0, 1 of three classes, logits 0, lam = 0.4, one step of all three with lr = 1.

    rho = (1, 1/2, 0), the teacher says 1/3 each. Label 0: (1/2, 1/6, 1/3), the true class taking all of its own, half
    of class 1's and none of class 2's. Label 1: (0, 2/3, 1/3). Their mean is 1/3 each, that of the labels
    (2/3, 1/3, 0), so g = 1/3 - 0.6 (2/3, 1/3, 0) - 0.4 / 3 = (-1/5, 0, 1/5).
    """
    work = LocalWork(steps=1, batch_size=3, lr=1.0)
    assert_vector(last(logits_of(SelfConfidence(lam=0.4), [0, 0, 0], [0, 0, 1], work)), [1 / 5, 0, -1 / 5])


@pytest.mark.parametrize(("tau", "student"), [(1.0, (1 / 2, 1 / 4, 1 / 4)), (0.5, (2 / 3, 1 / 6, 1 / 6))])
@pytest.mark.parametrize("window", [1, 2])
def test_global_distillation_in_one_round(window: int, tau: float, student: tuple[float, ...]) -> None:
    """Label 0, logits 0, lam = 0.6, two steps with lr = ln 2. There is only one global model, whatever the window.

    Step 1: p = 1/3 each, student = teacher: g = (-2/3, 1/3, 1/3), logits (2, -1, -1) ln 2 / 3.
    Step 2: p = (2, 1, 1)/4; at temperature tau the student says (2^(1/tau), 1, 1) over its sum, the teacher 1/3 each.
    tau² KL(teacher || student) has the gradient tau (student - teacher).
    """
    work = LocalWork(steps=2, batch_size=1, lr=LN2)
    federation = logits_of(GlobalDistillation(lam=0.6, tau=tau, window=window), [0, 0, 0], [0], work)
    g = np.array([-1 / 2, 1 / 4, 1 / 4]) + 0.6 * tau * (np.array(student) - 1 / 3)
    assert_vector(last(federation), LN2 * np.array([2, -1, -1]) / 3 - LN2 * g)


@pytest.mark.parametrize(("window", "teacher"), [(1, (2 / 3, 1 / 6, 1 / 6)), (2, (1 / 2, 1 / 4, 1 / 4))])
def test_global_distillation_in_the_second_round(window: int, teacher: tuple[float, ...]) -> None:
    """As above at tau = 1/2, one step a round: the second starts from (2, -1, -1) ln 2 / 3, student (4, 1, 1)/6.

    window = 1: the teacher is that model, and the distillation has no gradient. window = 2: the teacher is the average
    of 0 and that model, (1, -1/2, -1/2) ln 2 / 3, which at tau = 1/2 says (2, 1, 1)/4.
    """
    work = LocalWork(steps=1, batch_size=1, lr=LN2)
    federation = logits_of(GlobalDistillation(lam=0.6, tau=0.5, window=window), [0, 0, 0], [0], work)
    g = np.array([-1 / 2, 1 / 4, 1 / 4]) + 0.6 * 0.5 * (np.array([2 / 3, 1 / 6, 1 / 6]) - teacher)
    assert_vector(last(federation, 2), LN2 * np.array([2, -1, -1]) / 3 - LN2 * g)


class Shift(nn.Module):
    """A head that adds its own b to the representation."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z + self.b


class Plane(nn.Module):
    """The representation of every input is z = (1, 1) at first, the logits are z + b: theta = (z, b)."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.projection, self.head = nn.Identity(), Shift()

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(x + self.z)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))  # type: ignore[no-any-return]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 2.0)])
def test_model_contrast_two_rounds(mu: float, tau: float) -> None:
    """Client 0 has label 0, client 1 label 1; one step a round with lr = 2.

    Round 1: logits (1, 1), p = 1/2 each; no previous model, hence no contrast. Client 0's z and b both move by
    -2 (-1/2, 1/2): z = (2, 0), b = (1, -1). Client 1 mirrors it, so that the mean is z = (1, 1), b = 0 again.
    Round 2: z = z_glob, where cos(z, z_glob) = 1 is flat. -log sigmoid(s_glob - s_prev) then has the gradient
    sigmoid(s_prev - s_glob) grad(s_prev), and grad cos(z, u) = (u/|u| - cos z/|z|) / |z|. Client 0: u = (2, 0),
    cos = 1/sqrt(2), grad cos = ((1, 0) - (1/2, 1/2)) / sqrt(2) = (1, -1) / sqrt(8). It pushes z away from (2, 0).
    """
    data = blind([0, 1], owners=[0, 1], classes=2)
    method = FedAvg(objective=ModelContrast(mu=mu, tau=tau))
    federation = Federation(
        test=0, model=Plane(), data=data, method=method, local=LocalWork(steps=1, batch_size=1, lr=2.0)
    )
    first, second = (done.state for done in federation.rounds(2))
    assert_vector(first.theta, [1, 1, 0, 0])
    assert_vector(first.clients[0]["previous"], [2, 0, 1, -1])
    assert_vector(first.clients[1]["previous"], [0, 2, -1, 1])
    push = mu / tau * sigmoid((1 / math.sqrt(2) - 1) / tau) / math.sqrt(8)
    assert_vector(second.clients[0]["previous"], [2 - 2 * push, 2 * push, 1, -1])
    assert_vector(second.clients[1]["previous"], [2 * push, 2 - 2 * push, -1, 1])


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 2.0)])
def test_model_contrast_pulls_toward_the_global_model(mu: float, tau: float) -> None:
    """Client 0's second round as above, of two steps: in the second one z has left z_glob.

    In the plane cos(z, u) is the cosine of the angle between them. With f the angle of z (z_glob's is pi/4, that of
    z_prev = (2, 0) is 0), its gradient is -sin(f - angle of u) / |z| along (-sin f, cos f).
    """
    data = blind([0], owners=[0], classes=2)
    method = FedAvg(objective=ModelContrast(mu=mu, tau=tau))
    federation = Federation(
        test=0, model=Plane(), data=data, method=method, local=LocalWork(steps=2, batch_size=1, lr=2.0)
    )
    start = federation.start()
    previous = torch.tensor([2, 0, 1, -1], dtype=torch.float64)
    known = start.clients.updated({0: start.clients.store.keep({"previous": previous})})
    done = next(federation.rounds(1, replace(start, clients=known)))

    push = mu / tau * sigmoid((1 / math.sqrt(2) - 1) / tau) / math.sqrt(8)
    z = (2 - 2 * push, 2 * push)  # and b = (1, -1)
    f = math.atan2(z[1], z[0])
    weight = mu / tau * sigmoid((math.cos(f) - math.cos(f - math.pi / 4)) / tau)
    turn = weight * (-math.sin(f) + math.sin(f - math.pi / 4)) / math.hypot(*z)
    wrong = sigmoid(z[1] - z[0] - 2)  # the probability of class 1; the cross-entropy's gradient is (-wrong, wrong)
    expected_z = [z[0] - 2 * (-wrong - turn * math.sin(f)), z[1] - 2 * (wrong + turn * math.cos(f))]
    assert_vector(done.state.theta, [*expected_z, 1 + 2 * wrong, -1 - 2 * wrong])


def on_the_plane(method: Method, steps: int) -> Federation:
    """Clients with one sample each, of labels 0, 0 and 1; every step has lr = 2."""
    work = LocalWork(steps=steps, batch_size=1, lr=2.0)
    return Federation(
        test=0, model=Plane(), data=blind([0, 0, 1], owners=[0, 1, 2], classes=2), method=method, local=work
    )


def test_fedper_two_rounds() -> None:
    """Round 1: p = 1/2 each; clients 0 and 1 move z and b by (1, -1), client 2 by (-1, 1): the mean z is (4/3, 2/3).

    Round 2: the logits of clients 0 and 1 are (4/3 + 1, 2/3 - 1), those of client 2 (4/3 - 1, 2/3 + 1). With p the
    probability of the wrong class, sigmoid(-8/3) and sigmoid(-4/3), z and b move by 2p (1, -1) and -2p (1, -1).
    """
    first, second = (done.state for done in on_the_plane(FedPer(), steps=1).rounds(2))
    assert_vector(first.theta, [4 / 3, 2 / 3, 0, 0])
    assert [first.clients[k]["head"].tolist() for k in range(3)] == [[1, -1], [1, -1], [-1, 1]]
    p, q = sigmoid(-8 / 3), sigmoid(-4 / 3)
    shift = (4 * p - 2 * q) / 3
    assert_vector(second.theta, [4 / 3 + shift, 2 / 3 - shift, 0, 0])
    for k, b in ((0, 1 + 2 * p), (1, 1 + 2 * p), (2, -1 - 2 * q)):
        assert_vector(second.clients[k]["head"], [b, -b])


def test_fedrep_head_first() -> None:
    """One step of b as above, then one of z at the logits (2, 0), or (0, 2): p = sigmoid(-2) is wrong."""
    state = last_state(on_the_plane(FedRep(head_share=0.5), steps=2))
    shift = 2 * sigmoid(-2) / 3
    assert_vector(state.theta, [1 + shift, 1 - shift, 0, 0])
    assert [state.clients[k]["head"].tolist() for k in range(3)] == [[1, -1], [1, -1], [-1, 1]]


def test_fedbabu_body_alone() -> None:
    """Two steps of z: to (2, 0), or (0, 2), and on by 2 sigmoid(-2)."""
    state, shift = last_state(on_the_plane(FedBABU(), steps=2)), (1 + 2 * sigmoid(-2)) / 3
    assert_vector(state.theta, [1 + shift, 1 - shift, 0, 0])
    assert not state.clients


def last_state(federation: Federation) -> RunState:
    return list(federation.rounds(1))[-1].state


# Centralized training.
@pytest.mark.parametrize(("momentum", "rounds"), [(0.0, 4), (0.9, 1)])
@pytest.mark.parametrize("work", [LocalWork(epochs=2, batch_size=16), LocalWork(steps=7, batch_size=16)])
def test_fedavg_with_one_client_is_torch_sgd(work: LocalWork, momentum: float, rounds: int) -> None:
    """Momentum starts anew in every round, so it agrees within one."""
    work = replace(work, lr=0.2, weight_decay=0.01, momentum=momentum)
    torch.manual_seed(0)
    module, data = MLP((5,), 4, [7]).double(), small_federation()
    federation = Federation(test=0, model=module, data=data, partition=Pooled(), local=work, seed=3)
    state = list(federation.rounds(rounds))[-1].state

    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=momentum, weight_decay=0.01)
    for t in range(1, rounds + 1):
        for batch in shuffled(len(data.train), 16, work.steps, work.epochs, generator(3, "batches", t, 0)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(data.train.x[batch]), data.train.y[batch]).backward()
            optimizer.step()
    for name, weights in federation.state_dict(state).items():
        np.testing.assert_allclose(weights.numpy(), module.state_dict()[name].numpy(), rtol=0, atol=1e-12)
