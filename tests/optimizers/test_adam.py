"""Adam and AdamW at a client: against torch.optim step by step, in NumPy over whole rounds, and by their reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import updated
from fedadc.data import from_clients
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import FedAvg, FedAvgM, FedProx, Method, SlowMo
from fedadc.models import MLP
from fedadc.optimizers import SGD, Adam, AdamW, Optimizer
from fedadc.views.local_work import LocalWork

PAIRS = [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)]


def gradients(steps: int, size: int = 30) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=random, dtype=torch.float64) * 3.0 ** (t % 5 - 2) for t in range(steps)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.0, 0.0)])
def test_every_step_is_that_of_torch(ours: type[Adam], theirs: Any, betas: tuple[float, float]) -> None:
    """Parameters after each of 40 steps with weight decay and a rate that changes."""
    start = gradients(1)[0]
    mine, parameter = start.clone(), nn.Parameter(start.clone())
    reference = theirs([parameter], lr=0.1, betas=betas, eps=1e-6, weight_decay=0.03)
    stepper = ours(beta1=betas[0], beta2=betas[1], eps=1e-6).stepper(mine, {})
    for t, g in enumerate(gradients(40)):
        lr = 0.1 / (1 + t)
        reference.param_groups[0]["lr"] = lr
        parameter.grad = g.clone()
        reference.step()
        direction = stepper(g + 0.03 * mine if not ours.decoupled else g.clone())
        mine -= lr * (direction + (0.03 * mine if ours.decoupled else 0))
        stepper.next_step()
        assert torch.allclose(mine, parameter.detach(), rtol=0, atol=1e-13)


def one_client(optimizer: Optimizer, steps: int, weight_decay: float = 0.02) -> Federation:
    """One client whose batch is all that it has, so that its rounds are steps on one function."""
    torch.manual_seed(3)
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.arange(12) % 4
    work = LocalWork(steps=steps, batch_size=12, lr=0.05, weight_decay=weight_decay, optimizer=optimizer)
    data = from_clients([(x, y)], test=(x, y))
    return Federation(model=MLP((5,), 4, [6]).double(), data=data, local=work)


def by_torch(theirs: Any, steps: int, restart: int) -> Tensor:
    """Parameters after so many steps of torch's optimizer, which is made anew every `restart` steps."""
    torch.manual_seed(3)
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.arange(12) % 4
    module = MLP((5,), 4, [6]).double()
    for t in range(steps):
        if t % restart == 0:
            optimizer = theirs(module.parameters(), lr=0.05, weight_decay=0.02)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return flat(module)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_client_alone_that_keeps_its_moments_trains_as_without_a_federation(ours: Any, theirs: Any) -> None:
    """Six rounds of 5 steps are 30 steps; with moments of a round, they are 6 times 5 steps."""
    for moments, restart in (("client", 30), ("round", 5)):
        federation = one_client(ours(moments=moments), 5)
        last = list(federation.rounds(6))[-1].state
        expected = by_torch(theirs, 30, restart)
        own = federation.model.module
        federation.model.theta.copy_(last.theta)
        assert torch.allclose(flat(own), expected, rtol=0, atol=1e-12), moments
        if moments == "client":
            assert last.clients[0]["adam_steps"].tolist() == [30]
        else:
            assert not last.clients


# --- NumPy: softmax regression, whole rounds -------------------------------------------------------------------------


def softmax_gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of the mean cross-entropy of x W' + b, flat: W by rows, then b."""
    weight, bias = w[:20].reshape(4, 5), w[20:]
    logits = x @ weight.T + bias
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    return np.concatenate([(p.T @ x).ravel(), p.sum(axis=0)])


class NumpyAdam:
    """Algorithm 1 of Kingma and Ba as it stands there, in NumPy."""

    def __init__(self, beta1: float, beta2: float, eps: float) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.m, self.v, self.t = np.zeros(24), np.zeros(24), 0

    def direction(self, g: np.ndarray) -> np.ndarray:
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
        m_hat, v_hat = self.m / (1 - self.beta1**self.t), self.v / (1 - self.beta2**self.t)
        found: np.ndarray = m_hat / (np.sqrt(v_hat) + self.eps)
        return found


@pytest.mark.parametrize("moments", ["round", "client"])
@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("method", [FedAvg(), FedProx(mu=0.3), FedAvgM(beta=0.5), SlowMo(beta=0.5)], ids=repr)
def test_whole_rounds_agree_with_numpy(method: Method, kind: type[Adam], moments: Any) -> None:
    """Three clients, four rounds of three full-batch steps; the server's update by its formula."""
    rng, decay, lr = np.random.default_rng(5), 0.02, 0.05
    shares = [(rng.normal(size=(9, 5)), rng.integers(0, 4, 9)) for _ in range(3)]
    torch.manual_seed(0)
    module = nn.Linear(5, 4).double()
    tensors = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in shares]
    optimizer = kind(beta1=0.8, beta2=0.95, eps=1e-6, moments=moments)
    work = LocalWork(steps=3, batch_size=9, lr=lr, weight_decay=decay, optimizer=optimizer)
    federation = Federation(model=module, data=from_clients(tensors, test=tensors[0]), method=method, local=work)
    theta = np.concatenate([p.detach().numpy().ravel() for p in module.parameters()])
    steppers, m = [NumpyAdam(0.8, 0.95, 1e-6) for _ in range(3)], np.zeros(24)
    for result in federation.rounds(4):
        deltas = []
        for k, (x, y) in enumerate(shares):
            stepper = steppers[k] if moments == "client" else NumpyAdam(0.8, 0.95, 1e-6)
            w = theta.copy()
            for _ in range(3):
                g = softmax_gradient(w, x, y) + (decay * w if kind is Adam else 0)
                g = g + (method.mu * (w - theta) if isinstance(method, FedProx) else 0)
                w = w - lr * (stepper.direction(g) + (decay * w if kind is AdamW else 0))
            deltas.append(theta - w)
        mean = np.mean(deltas, axis=0)
        m = 0.5 * m + (mean / lr if isinstance(method, SlowMo) else mean)
        step = lr * m if isinstance(method, SlowMo) else m if isinstance(method, FedAvgM) else mean
        theta = theta - step
        assert np.abs(result.state.theta.numpy() - theta).max() < 1e-10


# --- reductions and closed forms --------------------------------------------------------------------------------------


def test_without_moments_a_step_is_the_sign_and_with_a_large_eps_it_is_sgd() -> None:
    (g,) = gradients(1)
    signs = Adam(beta1=0.0, beta2=0.0, eps=1e-30).stepper(g, {})(g.clone())
    assert torch.allclose(signs, g.sign(), rtol=0, atol=1e-15)
    eps = 1e9
    scaled = Adam(beta1=0.0, eps=eps).stepper(g, {})(g.clone()) * eps
    assert torch.allclose(scaled, g, rtol=1e-7)
    plain = one_client(SGD(), 4)
    adaptive = one_client(Adam(beta1=0.0, eps=eps), 4)
    theta = plain.start().theta
    sgd = updated(plain, 1, 0.05, theta, 0, 4).upload["delta"]
    adam = updated(adaptive, 1, 0.05 * eps, theta, 0, 4).upload["delta"]
    assert torch.allclose(sgd, adam, rtol=1e-6, atol=1e-9) and sgd.abs().max() > 1e-3


def test_the_first_direction_has_the_size_one_whatever_the_betas() -> None:
    (g,) = gradients(1)
    for beta1, beta2 in ((0.9, 0.999), (0.1, 0.5)):
        first = Adam(beta1=beta1, beta2=beta2, eps=1e-30).stepper(g, {})(g.clone())
        assert torch.allclose(first.abs(), torch.ones_like(g), atol=1e-12)


def test_several_gradients_of_a_step_start_from_the_same_moments() -> None:
    first, second, third = gradients(3)
    both, one = (Adam(moments="client").stepper(first, Adam(moments="client").client_state(first)) for _ in range(2))
    for stepper in (both, one):
        stepper(first.clone())
        stepper.next_step()
    both(third.clone())
    assert torch.equal(both(second.clone()), one(second.clone()))
    for stepper in (both, one):
        stepper.next_step()
    assert all(torch.equal(both.state()[name], one.state()[name]) for name in one.state())
    assert both.state()["adam_steps"].tolist() == [2]


def test_what_a_client_has_kept_is_not_overwritten() -> None:
    kept = Adam(moments="client").client_state(gradients(1)[0])
    before = {name: vector.clone() for name, vector in kept.items()}
    stepper = Adam(moments="client").stepper(gradients(1)[0], kept)
    for g in gradients(3):
        stepper(g)
        stepper.next_step()
    assert all(torch.equal(kept[name], before[name]) for name in kept)


def test_settings_out_of_range_are_refused() -> None:
    for wrong, words in [({"beta1": 1.0}, "beta1 must be in"), ({"beta2": -0.1}, "beta2 must be in"),
                         ({"eps": 0.0}, "eps must be"), ({"moments": "server"}, "moments must be")]:  # fmt: skip
        with pytest.raises(FedadcError, match=words):
            Adam(**wrong)  # type: ignore[arg-type]
    with pytest.raises(FedadcError, match="but Adam has moments of its own; set momentum to 0"):
        LocalWork(momentum=0.9, optimizer=Adam())
    with pytest.raises(FedadcError, match="optimizer must be an Optimizer"):
        LocalWork(optimizer="adam")  # type: ignore[arg-type]
