"""Every method and objective in NumPy, float64, for a small network: from the written rules alone, sharing no code.

What is not part of an algorithm is given: the data, the start, each round's learning rate, clients and batches, and
whose report is lost. delta = start − end, N = all clients, S = the clients whose report is counted in a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
State = dict[str, Array]
Round = tuple[float, dict[int, list[Integers]], set[int]]  # lr, {client: each batch's positions}, who is lost


@dataclass
class Network:
    """Linear layers; theta holds each one's weight [out, in] row by row, then its bias."""

    widths: tuple[int, ...]  # features, ..., embedding, classes
    relu: tuple[bool, ...]  # after each layer

    def layers(self, theta: Array) -> list[tuple[Array, Array]]:
        found, at = [], 0
        for a, b in pairwise(self.widths):
            found.append((theta[at : at + a * b].reshape(b, a), theta[at + a * b : at + a * b + b]))
            at += a * b + b
        assert at == len(theta)
        return found

    @property
    def body(self) -> int:
        """How many numbers come before the last layer's."""
        return sum(a * b + b for a, b in pairwise(self.widths[:-1]))

    def outputs(self, theta: Array, x: Array) -> list[Array]:
        """The input and the output of every layer: the embedding at [-2], the logits at [-1]."""
        found = [x]
        for (weight, bias), relu in zip(self.layers(theta), self.relu, strict=True):
            z = found[-1] @ weight.T + bias
            found.append(np.maximum(z, 0) if relu else z)
        return found

    def gradient(self, theta: Array, x: Array, loss: Loss) -> Array:
        """Of the mean loss of a batch, with respect to theta."""
        outputs, head = self.outputs(theta, x), len(self.relu) - 1
        d, parts = loss.d_logits, []
        for i, (weight, _) in reversed(list(enumerate(self.layers(theta)))):
            if self.relu[i]:
                d = d * (outputs[i + 1] > 0)
            parts += [d.sum(axis=0), (d.T @ outputs[i]).ravel()]
            d = d @ weight + (loss.d_embedding if i == head else 0.0)
        return np.concatenate(parts[::-1]) / len(x)


def mlp(features: int, hidden: int, classes: int, projection: int | None = None) -> Network:
    if projection is None:
        return Network((features, hidden, classes), (True, False))
    return Network((features, hidden, hidden, projection, classes), (True, True, False, False))


@dataclass
class Visit:
    """One client's round: what it has and receives, and the model it ends with."""

    network: Network
    shares: Array  # of the classes in all its data
    size: float  # n_k / mean n
    steps: int  # H or K: its real number of local steps
    lr: float
    theta: Array  # received
    server: State  # received
    own: State
    momentum: float = 0.0
    end: Array = field(init=False)
    beside: Array = field(init=False)  # where its second model ends, for methods with one

    def logits(self, model: Array, x: Array) -> Array:
        return self.network.outputs(model, x)[-1]


# Losses: what a client's objective is made of


@dataclass
class Loss:
    """Of each sample, with its gradient with respect to the logits and the embedding."""

    value: Array
    d_logits: Array
    d_embedding: Array | float = 0.0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.value + other.value, self.d_logits + other.d_logits, self.d_embedding + other.d_embedding)

    def __rmul__(self, factor: float) -> Loss:
        return Loss(factor * self.value, factor * self.d_logits, factor * self.d_embedding)


def softmax(z: Array) -> Array:
    p: Array = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return p


def ce(z: Array, y: Integers) -> Loss:
    p, true = softmax(z), np.eye(z.shape[1])[y]
    return Loss(-np.log((p * true).sum(axis=1)), p - true)


def kl(target: Array, z: Array, tau: float) -> Loss:
    """KL(target ‖ softmax(z/τ)); no gradient flows through the target."""
    p = softmax(z / tau)
    logarithm = np.log(np.where(target > 0, target, 1))  # 0 log 0 = 0
    return Loss((target * (logarithm - np.log(p))).sum(axis=1), (p - target) / tau)


def cosine(z: Array, u: Array) -> tuple[Array, Array]:
    """cos(z, u) of each row, and its gradient with respect to z."""
    z_norm, u_norm = (np.sqrt((a**2).sum(axis=1, keepdims=True)) for a in (z, u))
    cos = (z * u).sum(axis=1, keepdims=True) / (z_norm * u_norm)
    return cos, (u / u_norm - cos * z / z_norm) / z_norm


# Objectives


@dataclass
class Objective:
    loss: Callable[[Array, Array, Any, Visit], Loss]  # at theta, on x, y
    window: int = 1  # global models whose average the server keeps as teacher, where more than one
    keeps_model: bool = False  # each client keeps the model of its last counted round


def cross_entropy() -> Objective:
    return Objective(lambda theta, x, y, visit: ce(visit.logits(theta, x), y))


def squared_error() -> Objective:
    def loss(theta: Array, x: Array, y: Array, visit: Visit) -> Loss:
        error = visit.logits(theta, x) - y
        return Loss((error**2).mean(axis=1), 2 * error / error.shape[1])

    return Objective(loss)


def self_confidence(*, lam: float, tau: float = 1.0, teacher: str = "received", tau_squared: bool = False) -> Objective:
    """Section III: (1 − λ)CE + λ·KL; the target as printed: 1 − Σ over the non-true classes of (1 − ρ) p̃."""

    def loss(theta: Array, x: Array, y: Integers, visit: Visit) -> Loss:
        z = visit.logits(theta, x)
        p_teacher = softmax(visit.logits({"self": theta, "received": visit.theta}[teacher], x) / tau)
        rho, true = visit.shares / visit.shares.max(), np.eye(z.shape[1])[y]
        target = (1 - true) * (1 - rho) * p_teacher
        target = target + true * (1 - target.sum(axis=1, keepdims=True))
        return (1 - lam) * ce(z, y) + lam * (tau**2 if tau_squared else 1) * kl(target, z, tau)

    return Objective(loss)


def restricted_softmax(*, alpha: float, soft: bool = False) -> Objective:
    """FedRS: the logits of classes that the client lacks are scaled by α; soft: all by α + (1 − α) p_c/max p."""

    def loss(theta: Array, x: Array, y: Integers, visit: Visit) -> Loss:
        p = visit.shares
        scale = alpha + (1 - alpha) * p / p.max() if soft else np.where(p == 0, alpha, 1.0)
        scaled = ce(scale * visit.logits(theta, x), y)
        return Loss(scaled.value, scale * scaled.d_logits)

    return Objective(loss)


def not_true_distillation(*, beta: float, tau: float) -> Objective:
    """FedNTD: CE + β·τ²·KL(teacher ‖ student) over the softmax of the C − 1 non-true logits."""

    def loss(theta: Array, x: Array, y: Integers, visit: Visit) -> Loss:
        z, z_teacher = visit.logits(theta, x), visit.logits(visit.theta, x)
        others = np.eye(z.shape[1])[y] == 0
        student, teacher = (a[others].reshape(len(x), -1) for a in (z, z_teacher))
        distance, d_logits = kl(softmax(teacher / tau), student, tau), np.zeros_like(z)
        d_logits[others] = distance.d_logits.ravel()
        return ce(z, y) + beta * tau**2 * Loss(distance.value, d_logits)

    return Objective(loss)


def global_distillation(*, lam: float, tau: float, window: int = 1) -> Objective:
    """FedGKD: CE + λ·T²·KL(teacher ‖ student); teacher = average of the last M global models (M=1: the received)."""

    def loss(theta: Array, x: Array, y: Integers, visit: Visit) -> Loss:
        z, z_teacher = visit.logits(theta, x), visit.logits(visit.server.get("teacher", visit.theta), x)
        return ce(z, y) + lam * tau**2 * kl(softmax(z_teacher / tau), z, tau)

    return Objective(loss, window=window)


def model_contrast(*, mu: float, tau: float) -> Objective:
    """MOON: CE + μ·contrast, −log(e^near / (e^near + e^far)) with near = cos(z, z_glob)/T, far = cos(z, z_prev)/T."""

    def loss(theta: Array, x: Array, y: Integers, visit: Visit) -> Loss:
        *_, z, logits = visit.network.outputs(theta, x)
        if "previous" not in visit.own:  # zero contrast gradient
            return ce(logits, y)
        near, d_near = cosine(z, visit.network.outputs(visit.theta, x)[-2])
        far, d_far = cosine(z, visit.network.outputs(visit.own["previous"], x)[-2])
        p = softmax(np.hstack([near, far]) / tau)
        contrast = Loss(-np.log(p[:, 0]), np.zeros_like(logits), p[:, 1:] * (d_far - d_near) / tau)
        return ce(logits, y) + mu * contrast

    return Objective(loss, keeps_model=True)


# Methods


@dataclass
class Reports:
    """What the server goes on with after a round."""

    theta: Array
    server: State
    lr: float
    mean: Array  # of delta over S, weighted
    visits: list[Visit]  # S
    weights: list[float]  # of S
    clients: int  # N


@dataclass
class Method:
    serve: Callable[[Reports], tuple[Array, State]]
    server: dict[str, float] = field(default_factory=dict)  # the server's vectors, with what they are filled at first
    client: dict[str, float] = field(default_factory=dict)  # a client's
    begin: Callable[[Visit], Array] = lambda visit: visit.theta
    moving: Callable[[int, Visit], slice] = lambda step, visit: slice(None)  # what a step trains, all else frozen
    correction: Callable[[Array, Visit], Array | float] = lambda w, visit: 0.0
    after: Callable[[Visit], State] = lambda visit: {}  # the client's state
    beta_local: float = 0.0
    nesterov: bool = False
    phi: float | None = None
    beside: Method | None = None  # how a client trains its second model, on the same batches


def fedavg() -> Method:
    return Method(lambda r: (r.theta - r.mean, {}))


def slowmo(*, beta: float, server_lr: float = 1.0) -> Method:
    def serve(r: Reports) -> tuple[Array, State]:
        m = beta * r.server["m"] + r.mean / r.lr
        return r.theta - server_lr * r.lr * m, {"m": m}

    return Method(serve, server={"m": 0})


def fedadc(*, beta: float, beta_local: float | None = None, nesterov: bool = False, server_lr: float = 1.0) -> Method:
    """Algorithm 3: blue, or red (nesterov)."""
    embedded = beta if beta_local is None else beta_local

    def serve(r: Reports) -> tuple[Array, State]:
        m = r.mean / r.lr + (beta - embedded) * r.server["m"]
        return r.theta - server_lr * r.lr * m, {"m": m}

    return Method(serve, server={"m": 0}, beta_local=embedded, nesterov=nesterov)


def fedadc_double(*, beta: float, phi: float, server_lr: float = 1.0) -> Method:
    """Algorithm 4."""
    return replace(fedadc(beta=beta, server_lr=server_lr), phi=phi)


def fedprox(*, mu: float) -> Method:
    return replace(fedavg(), correction=lambda w, visit: mu * (w - visit.theta))


def fednova(*, mu: float = 0.0, beta: float = 0.0, server_lr: float = 1.0) -> Method:
    """θ ← θ − τ_eff Σ p_k delta_k / ‖a_k‖₁, τ_eff = Σ p_k ‖a_k‖₁; a_j: how far delta_k / lr follows gradient j."""

    def norm(visit: Visit) -> float:
        j = np.arange(visit.steps)
        if not mu:  # 1 + ρ + … + ρ^(τ−1−j)
            rho = visit.momentum
            return float(((1 - rho ** (visit.steps - j)) / (1 - rho)).sum())
        step = np.array([[1 - visit.lr * mu, visit.momentum], [-visit.lr * mu, visit.momentum]])  # of (moved, velocity)
        return float(sum((np.linalg.matrix_power(step, int(visit.steps - 1 - i)) @ [1.0, 1.0])[0] for i in j))

    def serve(r: Reports) -> tuple[Array, State]:
        norms = np.array([norm(visit) for visit in r.visits])
        deltas = [(r.theta - visit.end) / a for visit, a in zip(r.visits, norms, strict=True)]
        change = np.average(norms, weights=r.weights) * np.average(deltas, axis=0, weights=r.weights)
        if not beta:
            return r.theta - server_lr * change, {}
        m = beta * r.server["m"] + change / r.lr
        return r.theta - server_lr * r.lr * m, {"m": m}

    return Method(serve, server={"m": 0} if beta else {}, correction=lambda w, visit: mu * (w - visit.theta))


def feddyn(*, alpha: float, alpha_by_size: bool = False) -> Method:
    """Locally f_k(θ) − ⟨h_k, θ⟩ + α/2‖θ − θ_t‖²."""

    def alpha_k(visit: Visit) -> float:
        return alpha / visit.size if alpha_by_size else alpha

    def correction(w: Array, visit: Visit) -> Array:
        return -visit.own["h"] + alpha_k(visit) * (w - visit.theta)

    def after(visit: Visit) -> State:
        return {"h": visit.own["h"] - alpha_k(visit) * (visit.end - visit.theta)}

    def serve(r: Reports) -> tuple[Array, State]:
        ends = np.stack([visit.end for visit in r.visits])
        h = r.server["h"] - alpha / r.clients * (ends - r.theta).sum(axis=0)
        return ends.mean(axis=0) - h / alpha, {"h": h}

    return Method(serve, {"h": 0}, {"h": 0}, correction=correction, after=after)


def scaffold(*, server_lr: float = 1.0) -> Method:
    def correction(w: Array, visit: Visit) -> Array:
        return -visit.own["c"] + visit.server["c"]

    def after(visit: Visit) -> State:
        delta = visit.theta - visit.end
        return {"c": visit.own["c"] - visit.server["c"] + delta / (visit.steps * visit.lr)}

    def serve(r: Reports) -> tuple[Array, State]:
        change = np.sum([after(visit)["c"] - visit.own["c"] for visit in r.visits], axis=0)
        return r.theta - server_lr * r.mean, {"c": r.server["c"] + change / r.clients}

    return Method(serve, {"c": 0}, {"c": 0}, correction=correction, after=after)


def fedavgm(*, beta: float, server_lr: float = 1.0) -> Method:
    def serve(r: Reports) -> tuple[Array, State]:
        m = beta * r.server["m"] + r.mean
        return r.theta - server_lr * m, {"m": m}

    return Method(serve, server={"m": 0})


def adaptive(next_v: Callable[[Array, Array], Array], beta1: float, tau: float, server_lr: float) -> Method:
    def serve(r: Reports) -> tuple[Array, State]:
        m = beta1 * r.server["m"] + (1 - beta1) * r.mean
        v = next_v(r.server["v"], r.mean**2)
        return r.theta - server_lr * m / (np.sqrt(v) + tau), {"m": m, "v": v}

    return Method(serve, server={"m": 0, "v": tau**2})


def fedadam(*, beta1: float, beta2: float, tau: float, server_lr: float) -> Method:
    return adaptive(lambda v, d2: beta2 * v + (1 - beta2) * d2, beta1, tau, server_lr)


def fedyogi(*, beta1: float, beta2: float, tau: float, server_lr: float) -> Method:
    return adaptive(lambda v, d2: v - (1 - beta2) * d2 * np.sign(v - d2), beta1, tau, server_lr)


def fedadagrad(*, beta1: float, tau: float, server_lr: float) -> Method:
    return adaptive(lambda v, d2: v + d2, beta1, tau, server_lr)


def local_only() -> Method:
    """Every client goes on from its own last model."""
    return Method(lambda r: (r.theta, {}), begin=own_model, after=lambda visit: {"model": visit.end})


def own_model(visit: Visit) -> Array:
    return visit.own.get("model", visit.theta)


def fedper() -> Method:
    """The last layer is each client's own; the server averages all before it."""

    def begin(visit: Visit) -> Array:
        at = visit.network.body
        return np.concatenate([visit.theta[:at], visit.own.get("head", visit.theta[at:])])

    def serve(r: Reports) -> tuple[Array, State]:
        at = r.visits[0].network.body
        return np.concatenate([(r.theta - r.mean)[:at], r.theta[at:]]), {}

    return Method(serve, begin=begin, after=lambda visit: {"head": visit.end[visit.network.body :]})


def fedrep(*, head_share: float) -> Method:
    """As FedPer; the head's steps come first, then those of the body, of which there is one at least."""

    def moving(step: int, visit: Visit) -> slice:
        heads = min(round(head_share * visit.steps), visit.steps - 1)
        return slice(visit.network.body, None) if step < heads else slice(0, visit.network.body)

    return replace(fedper(), moving=moving)


def fedbabu() -> Method:
    return replace(fedavg(), moving=lambda step, visit: slice(0, visit.network.body))


def ditto(*, lam: float) -> Method:
    """v minimizes f_k(v) + λ/2‖v − θ_t‖²: FedProx's steps, from the last v on."""
    near = replace(fedprox(mu=lam), begin=own_model)
    return replace(fedavg(), beside=near, after=lambda visit: {"model": visit.beside})


# Rounds


@dataclass
class Problem:
    network: Network
    x: list[Array]  # per client
    y: list[Any]  # of every client: classes [n], or scaled numbers [n, targets]
    method: Method
    objective: Objective = field(default_factory=cross_entropy)
    weighting: Literal["uniform", "samples"] = "uniform"
    weight_decay: float = 0.0
    clip: float | None = None
    momentum: float = 0.0


@dataclass
class Run:
    theta: Array
    server: State
    clients: dict[int, State]  # of the clients that have a state


def filled(names: dict[str, float], theta: Array) -> State:
    return {name: np.full_like(theta, value) for name, value in names.items()}


def teaching(theta: Array, server: State, window: int) -> State:
    """The last global models, newest first and with the one that goes out next, and their average."""
    if window == 1:
        return {}
    recent = np.stack([theta, *server.get("recent", ())][:window])
    return {"recent": recent, "teacher": recent.mean(axis=0)}


def start(problem: Problem, theta: Array) -> Run:
    return Run(theta, filled(problem.method.server, theta) | teaching(theta, {}, problem.objective.window), {})


def local_round(
    problem: Problem, method: Method, visit: Visit, x: Array, y: Integers, batches: list[Integers]
) -> Array:
    w, v = method.begin(visit), None
    m_bar = method.beta_local * visit.server["m"] / visit.steps if method.beta_local else np.zeros_like(w)
    for step, batch in enumerate(batches):
        moves = np.zeros_like(w)
        moves[method.moving(step, visit)] = 1
        at = w - visit.lr * m_bar if method.nesterov else w
        g = moves * problem.network.gradient(at, x[batch], problem.objective.loss(at, x[batch], y[batch], visit))
        if problem.clip is not None:
            g = g * min(1.0, problem.clip / np.sqrt((g**2).sum()))
        g = g + moves * (problem.weight_decay * at + method.correction(at, visit))
        if v is None:
            v = g
        else:
            v = problem.momentum * v + g if method.phi is None else method.phi * v + (1 - method.phi) * g
        w = w - visit.lr * moves * (m_bar + v)
    return w


def next_round(problem: Problem, run: Run, lr: float, cohort: dict[int, list[Integers]], lost: set[int]) -> Run:
    method, objective, sizes = problem.method, problem.objective, np.array([len(y) for y in problem.y])
    visits, clients = [], dict(run.clients)
    for k, batches in cohort.items():
        if k in lost:  # it trains, but nothing of it is seen
            continue
        classes = problem.y[k] if problem.y[k].ndim == 1 else np.zeros(sizes[k], dtype=np.int64)  # numbers have none
        shares = np.bincount(classes, minlength=problem.network.widths[-1]) / sizes[k]
        own = run.clients.get(k, filled(method.client, run.theta))
        size = sizes[k] / sizes.mean()
        visit = Visit(problem.network, shares, size, len(batches), lr, run.theta, run.server, own, problem.momentum)
        visit.end = local_round(problem, method, visit, problem.x[k], problem.y[k], batches)
        if method.beside is not None:
            visit.beside = local_round(problem, method.beside, visit, problem.x[k], problem.y[k], batches)
        visits.append(visit)
        after = method.after(visit) | ({"previous": visit.end} if objective.keeps_model else {})
        clients |= {k: after} if after else {}
    weights = [visit.size if problem.weighting == "samples" else 1.0 for visit in visits]
    mean = np.average([run.theta - visit.end for visit in visits], axis=0, weights=weights)
    theta, server = method.serve(Reports(run.theta, run.server, lr, mean, visits, weights, len(sizes)))
    return Run(theta, server | teaching(theta, run.server, objective.window), clients)


def train(problem: Problem, theta: Array, rounds: Iterable[Round]) -> Run:
    run = start(problem, theta)
    for lr, cohort, lost in rounds:
        run = next_round(problem, run, lr, cohort, lost)
    return run
