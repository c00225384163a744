"""The reference judges the package; here it is judged itself: by finite differences, by hand, by reductions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import reference as ref

RNG = np.random.default_rng
NETWORKS = {"plain": ref.mlp(5, 7, 4), "projection": ref.mlp(5, 7, 4, projection=6)}
OBJECTIVES = {
    "cross_entropy": ref.cross_entropy(),
    "self_confidence": ref.self_confidence(lam=0.4, tau=2.5),
    "self_confidence, tau squared": ref.self_confidence(lam=0.4, tau=2.5, tau_squared=True),
    "restricted_softmax": ref.restricted_softmax(alpha=0.5),
    "restricted_softmax, soft": ref.restricted_softmax(alpha=0.5, soft=True),
    "not_true_distillation": ref.not_true_distillation(beta=0.7, tau=2.5),
    "global_distillation": ref.global_distillation(lam=0.6, tau=0.5, window=3),
    "model_contrast": ref.model_contrast(mu=2.0, tau=0.5),
    "squared_error": ref.squared_error(),
}


def parameters(network: ref.Network, rng: np.random.Generator) -> ref.Array:
    return rng.normal(size=sum((a + 1) * b for a, b in zip(network.widths, network.widths[1:], strict=False)))


def visit(network: ref.Network, rng: np.random.Generator) -> ref.Visit:
    """A client that lacks class 1, with every model a loss can look at."""
    theta, teacher, previous = (parameters(network, rng) for _ in range(3))
    shares = np.array([0.5, 0.0, 0.3, 0.2])
    return ref.Visit(network, shares, 1.0, 1, 0.1, theta, {"teacher": teacher}, {"previous": previous})


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_gradients_are_central_differences(network: ref.Network, objective: ref.Objective) -> None:
    rng = RNG(0)
    seen, theta = visit(network, rng), parameters(network, rng)
    x, y = rng.normal(size=(9, 5)), rng.integers(4, size=9)
    y = rng.normal(size=(9, 4)) if objective is OBJECTIVES["squared_error"] else y
    gradient = network.gradient(theta, x, objective.loss(theta, x, y, seen))
    step, differences = 1e-6, np.zeros_like(theta)
    for i, unit in enumerate(np.eye(len(theta))):
        above, below = (objective.loss(theta + s * unit, x, y, seen).value.mean() for s in (step, -step))
        differences[i] = (above - below) / (2 * step)
    np.testing.assert_allclose(gradient, differences, rtol=0, atol=1e-7)
    assert np.abs(gradient).max() > 0.1


def test_the_teacher_self_is_the_current_model_without_gradient() -> None:
    rng, network = RNG(0), NETWORKS["plain"]
    theta, x, y = parameters(network, rng), rng.normal(size=(9, 5)), rng.integers(4, size=9)
    seen = replace(visit(network, rng), theta=theta)
    found, expected = (
        ref.self_confidence(lam=0.4, tau=1.5, teacher=teacher).loss(theta, x, y, seen)
        for teacher in ("self", "received")
    )
    np.testing.assert_array_equal(found.d_logits, expected.d_logits)


def losses_by_hand(z: Any, z_teacher: Any, y: int, rho: Any) -> dict[str, float]:
    """Of one sample, as the rules say them."""

    def q(logits: Any, tau: float) -> Any:
        return np.exp(logits / tau) / np.exp(logits / tau).sum()

    cross = -np.log(q(z, 1)[y])
    others = [c for c in range(4) if c != y]
    target = [(1 - rho[c]) * q(z_teacher, 2.5)[c] if c != y else 0 for c in range(4)]
    target[y] = 1 - sum(target)
    confident = sum(t * np.log(t / p) for t, p in zip(target, q(z, 2.5), strict=True) if t > 0)
    lacking = np.where(rho == 0, 0.5, 1)

    def distance(t: Any, p: Any) -> float:
        return float((t * np.log(t / p)).sum())

    return {
        "self_confidence": 0.6 * cross + 0.4 * confident,
        "self_confidence, tau squared": 0.6 * cross + 0.4 * 2.5**2 * confident,
        "restricted_softmax": -np.log(q(lacking * z, 1)[y]),
        "restricted_softmax, soft": -np.log(q((0.5 + 0.5 * rho) * z, 1)[y]),
        "not_true_distillation": cross + 0.7 * 2.5**2 * distance(q(z_teacher[others], 2.5), q(z[others], 2.5)),
        "global_distillation": cross + 0.6 * 0.5**2 * distance(q(z_teacher, 0.5), q(z, 0.5)),
    }


def test_losses_of_one_sample_by_hand() -> None:
    rng, network = RNG(1), NETWORKS["projection"]
    seen, theta, x = visit(network, rng), parameters(network, rng), rng.normal(size=(1, 5))
    for y in range(4):
        for name in losses_by_hand(np.zeros(4), np.zeros(4), y, np.ones(4)):
            teacher = seen.server["teacher"] if name == "global_distillation" else seen.theta
            z, z_teacher = seen.logits(theta, x)[0], seen.logits(teacher, x)[0]
            expected = losses_by_hand(z, z_teacher, y, seen.shares / seen.shares.max())[name]
            found = OBJECTIVES[name].loss(theta, x, np.array([y]), seen).value[0]
            assert found == pytest.approx(expected, abs=1e-12), name
        z, near, far = (network.outputs(model, x)[-2][0] for model in (theta, seen.theta, seen.own["previous"]))
        near, far = (np.exp(z @ u / np.linalg.norm(z) / np.linalg.norm(u) / 0.5) for u in (near, far))
        contrast = OBJECTIVES["model_contrast"].loss(theta, x, np.array([y]), seen).value[0]
        cross = OBJECTIVES["cross_entropy"].loss(theta, x, np.array([y]), seen).value[0]
        assert contrast - cross == pytest.approx(-2 * np.log(near / (near + far)), abs=1e-12)


def problem(
    method: ref.Method, clients: int = 5, network: ref.Network = NETWORKS["plain"], **other: Any
) -> ref.Problem:
    rng = RNG(4)
    x = [rng.normal(size=(8 + 3 * k, 5)) + rng.normal(size=5) for k in range(clients)]
    y = [rng.choice(4, size=len(part), p=rng.dirichlet(np.full(4, 0.7))) for part in x]
    settings: dict[str, Any] = {"weight_decay": 0.05, "clip": 0.5, "momentum": 0.6} | other
    return ref.Problem(network, x, y, method, **settings)


def rounds(of: ref.Problem, number: int = 5, steps: int | None = None, lose: bool = False) -> list[ref.Round]:
    """Three clients a round at most, a step or two more for larger clients, a falling learning rate."""
    found: list[ref.Round] = []
    for t in range(number):
        rng = RNG(100 + t)
        cohort = rng.permutation(len(of.y))[:3].tolist()
        batches = {k: [rng.permutation(len(of.y[k]))[:4] for _ in range(steps or 2 + k)] for k in cohort}
        found.append((0.3 * 0.9**t, batches, set(cohort[:1]) if lose else set()))
    return found


def begin(of: ref.Problem) -> ref.Array:
    return 0.5 * parameters(of.network, RNG(9))


def assert_equal(a: ref.Problem, b: ref.Problem, atol: float = 1e-12, **how: Any) -> None:
    one, other = (ref.train(p, begin(p), rounds(p, **how)).theta for p in (a, b))
    np.testing.assert_allclose(one, other, rtol=0, atol=atol)
    assert np.abs(one - begin(a)).max() > 1e-2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ref.slowmo(beta=0.0), ref.fedavg()),
        (ref.fedadc(beta=0.0), ref.fedavg()),
        (ref.fedadc(beta=0.0, nesterov=True), ref.fedavg()),
        (ref.fedprox(mu=0.0), ref.fedavg()),
        (ref.fedavgm(beta=0.0), ref.fedavg()),
        (ref.fedadc(beta=0.8, beta_local=0.0, server_lr=0.9), ref.slowmo(beta=0.8, server_lr=0.9)),
    ],
)
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_methods_that_reduce_to_another(one: ref.Method, other: ref.Method, weighting: str) -> None:
    assert_equal(problem(one, weighting=weighting), problem(other, weighting=weighting))


def test_heavy_ball_is_slowmo_at_one_step_and_nesterov_is_not() -> None:
    assert_equal(problem(ref.fedadc(beta=0.8)), problem(ref.slowmo(beta=0.8)), steps=1)
    with pytest.raises(AssertionError):
        assert_equal(problem(ref.fedadc(beta=0.8, nesterov=True)), problem(ref.slowmo(beta=0.8)), steps=1)


def test_double_momentum_without_phi_is_heavy_ball() -> None:
    double, heavy_ball = ref.fedadc_double(beta=0.8, phi=0.0), ref.fedadc(beta=0.8)
    assert_equal(problem(double, momentum=0.0), problem(heavy_ball, momentum=0.0))


@pytest.mark.parametrize("nesterov", [False, True])
def test_on_linear_losses_fedadc_is_slowmo(nesterov: bool) -> None:
    def linear(theta: ref.Array, x: ref.Array, y: ref.Integers, seen: ref.Visit) -> ref.Loss:
        true = np.eye(4)[y]
        return ref.Loss((true * seen.logits(theta, x)).sum(axis=1), true)

    how: dict[str, Any] = {"network": ref.Network((5, 4), (False,)), "objective": ref.Objective(linear)}
    one, other = (
        problem(method, weight_decay=0.0, **how)
        for method in (ref.fedadc(beta=0.8, nesterov=nesterov), ref.slowmo(beta=0.8))
    )
    assert_equal(one, other)


@pytest.mark.parametrize(
    "objective",
    [
        ref.self_confidence(lam=0.0, tau=2.0),
        ref.restricted_softmax(alpha=1.0),
        ref.restricted_softmax(alpha=1.0, soft=True),
        ref.not_true_distillation(beta=0.0, tau=2.0),
        ref.global_distillation(lam=0.0, tau=2.0, window=2),
        ref.model_contrast(mu=0.0, tau=0.5),
    ],
)
@pytest.mark.parametrize("method", [ref.fedavg(), ref.fedadc(beta=0.8, nesterov=True)])
def test_objectives_that_reduce_to_cross_entropy(method: ref.Method, objective: ref.Objective) -> None:
    network = NETWORKS["projection"]
    assert_equal(problem(method, network=network, objective=objective), problem(method, network=network))


def test_self_confidence_with_uniform_classes_is_cross_entropy() -> None:
    one, other = (problem(ref.fedavg(), objective=o) for o in (ref.self_confidence(lam=0.4), ref.cross_entropy()))
    one.y = other.y = [np.arange(len(y) - len(y) % 4) % 4 for y in one.y]
    assert_equal(one, other)


def test_scaffold_of_one_client_is_fedavg() -> None:
    one, other = (problem(method, clients=1, momentum=0.0) for method in (ref.scaffold(), ref.fedavg()))
    assert_equal(one, other)


@pytest.mark.parametrize("by_size", [False, True])
def test_feddyn_ends_at_the_optimum_of_the_mean(by_size: bool) -> None:
    """Unweighted; with alpha by size, weighted by samples. Softmax regression with weight decay is convex."""
    network = ref.Network((5, 4), (False,))
    of = problem(
        ref.feddyn(alpha=0.3, alpha_by_size=by_size), network=network, clip=None, weight_decay=0.1, momentum=0.0
    )
    everyone = {k: [np.arange(len(y))] * 10 for k, y in enumerate(of.y)}
    run = ref.train(of, begin(of), [(0.2, everyone, set())] * 400)

    def gradient(theta: ref.Array, k: int) -> ref.Array:
        loss = ref.ce(network.outputs(theta, of.x[k])[-1], of.y[k])
        return network.gradient(theta, of.x[k], loss) + of.weight_decay * theta

    own = [gradient(run.theta, k) for k in range(5)]
    mean = np.average(own, axis=0, weights=[len(y) if by_size else 1 for y in of.y])
    np.testing.assert_allclose(mean, 0, atol=1e-10)
    for k, state in run.clients.items():
        np.testing.assert_allclose(state["h"], own[k], atol=1e-10)
    assert min(np.abs(g).max() for g in own) > 1e-2


@pytest.mark.parametrize("name", ["c", "h", "h by size"])
def test_tracked_state_is_the_mean_over_all_clients(name: str) -> None:
    by_size = name == "h by size"
    method = ref.scaffold() if name == "c" else ref.feddyn(alpha=0.3, alpha_by_size=by_size)
    of = problem(method, momentum=0.0)
    sizes = np.array([len(y) for y in of.y])
    weights = sizes / sizes.mean() if by_size else np.ones(5)
    run = ref.start(of, begin(of))
    for lr, cohort, lost in rounds(of, 8, lose=True):
        run = ref.next_round(of, run, lr, cohort, lost)
        mean = sum(weights[k] * state[name[0]] for k, state in run.clients.items()) / 5
        np.testing.assert_allclose(run.server[name[0]], mean, rtol=0, atol=1e-12)
        assert np.abs(mean).max() > 1e-2


@pytest.mark.parametrize(
    "method", [ref.slowmo(beta=0.7, server_lr=0.8), ref.fedadc(beta=0.9, beta_local=0.5, server_lr=1.2)]
)
def test_the_servers_step_is_along_its_momentum(method: ref.Method) -> None:
    of = problem(method)
    run = ref.start(of, begin(of))
    server_lr = 0.8 if method.beta_local == 0 else 1.2
    for lr, cohort, lost in rounds(of):
        before, run = run, ref.next_round(of, run, lr, cohort, lost)
        np.testing.assert_allclose(before.theta - run.theta, server_lr * lr * run.server["m"], rtol=0, atol=1e-12)


def test_the_distillation_window_holds_the_last_models_newest_first() -> None:
    of = problem(ref.fedavg(), objective=ref.global_distillation(lam=0.6, tau=2.0, window=3))
    run = ref.start(of, begin(of))
    models = [run.theta]
    for lr, cohort, lost in rounds(of):
        run = ref.next_round(of, run, lr, cohort, lost)
        models.insert(0, run.theta)
        np.testing.assert_array_equal(run.server["recent"], models[:3])
        np.testing.assert_allclose(run.server["teacher"], np.mean(models[:3], axis=0), rtol=0, atol=1e-15)


def test_lost_clients_keep_their_state_and_local_models_stay_local() -> None:
    of = problem(ref.local_only())
    run = ref.start(of, begin(of))
    for lr, cohort, lost in rounds(of, lose=True):
        before, run = run, ref.next_round(of, run, lr, cohort, lost)
        moved = {k for k in run.clients if k not in before.clients or run.clients[k] is not before.clients[k]}
        assert moved == cohort.keys() - lost and run.theta is before.theta
