"""The paper's algorithms in NumPy, float64, for softmax regression: written from the paper alone, sharing no code.

theta is the weights [classes, features] row by row, then the biases. What is not part of an algorithm (which clients,
which batches) is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Loss = Callable[..., tuple[Array, Array]]


@dataclass
class Problem:
    x: list[Array]  # per client
    y: list[Array]
    classes: int
    weight_decay: float = 0.0
    clip: float | None = None
    momentum: float = 0.0


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def logits(theta: Array, x: Array, classes: int) -> Array:
    w = theta[: classes * x.shape[1]].reshape(classes, -1)
    return x @ w.T + theta[classes * x.shape[1] :]


def chain(dz: Array, x: Array) -> Array:
    """Gradient with respect to theta from the gradient with respect to the logits of a mean loss."""
    return np.concatenate([(dz.T @ x).reshape(-1), dz.sum(axis=0)]) / len(x)


def cross_entropy(theta: Array, start: Array, x: Array, y: Array, labels: Array, classes: int) -> Array:
    return chain(softmax(logits(theta, x, classes)) - np.eye(classes)[y], x)


def self_confidence(lam: float, tau: float, teacher: str, tau_squared: bool = False) -> Callable[..., Array]:
    """Equations of section III, the target as printed: 1 - sum over the non-true classes of (1 - rho) p~."""

    def gradient(theta: Array, start: Array, x: Array, y: Array, labels: Array, classes: int) -> Array:
        gamma = np.array([(labels == c).sum() for c in range(classes)]) / len(labels)
        rho = gamma / gamma.max()
        z = logits(theta, x, classes)
        p_teacher = softmax((z if teacher == "self" else logits(start, x, classes)) / tau)
        target = np.zeros_like(p_teacher)
        for i in range(len(x)):
            for c in range(classes):
                if c != y[i]:
                    target[i, c] = (1 - rho[c]) * p_teacher[i, c]
            target[i, y[i]] = 1 - target[i].sum()
        d_ce = softmax(z) - np.eye(classes)[y]
        d_kl = (softmax(z / tau) - target) / tau * (tau**2 if tau_squared else 1)
        return chain((1 - lam) * d_ce + lam * d_kl, x)

    return gradient


def train(problem: Problem, theta: Array, rounds: list[tuple[float, dict[int, list[Array]]]], method: str,
          gradient: Callable[..., Array] = cross_entropy, *, beta: float = 0.0, beta_local: float = 0.0,
          phi: float = 0.0, alpha: float = 1.0, weights: str = "uniform") -> tuple[Array, Array]:  # fmt: skip
    """rounds: (lr, {client: batches of positions}). Returns theta and the server's momentum."""
    m = np.zeros_like(theta)
    for lr, cohort in rounds:
        deltas, counts = [], []
        for k, batches in cohort.items():
            w, v, own = theta.copy(), np.zeros_like(theta), None
            m_bar = beta_local * m / len(batches)

            def g_at(point: Array, batch: Array, k: int = k, start: Array = theta) -> Array:
                g = gradient(point, start, problem.x[k][batch], problem.y[k][batch], problem.y[k], problem.classes)
                if problem.clip is not None:
                    g = g * min(1.0, problem.clip / np.sqrt((g**2).sum()))
                return g + problem.weight_decay * point

            for batch in batches:
                if method == "fedadc nesterov":
                    half = w - lr * m_bar
                    v = problem.momentum * v + g_at(half, batch)
                    w = half - lr * v
                elif method == "fedadc double":
                    g = g_at(w, batch)
                    own = g if own is None else phi * own + (1 - phi) * g
                    w = w - lr * (m_bar + own)
                else:
                    v = problem.momentum * v + g_at(w, batch)
                    w = w - lr * (v + (m_bar if method == "fedadc heavy-ball" else 0))
            deltas.append(theta - w)
            counts.append(len(problem.y[k]) if weights == "samples" else 1)
        mean = sum(c * d for c, d in zip(counts, deltas, strict=True)) / sum(counts)
        if method == "fedavg":
            theta = theta - mean
        elif method == "slowmo":
            m = beta * m + mean / lr
            theta = theta - alpha * lr * m
        elif method == "fedadc double":
            m = mean / lr
            theta = theta - alpha * lr * m
        else:
            m = mean / lr + (beta - beta_local) * m
            theta = theta - alpha * lr * m
    return theta, m
