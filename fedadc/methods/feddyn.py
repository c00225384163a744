"""FedDyn (Acar et al., ICLR 2021, Algorithm 1): a dynamic regularizer makes local optima agree with the global one.

A client minimizes f_k(theta) - <h_k, theta> + alpha/2 ||theta - theta_t||² (its eq. 1), where h_k approaches the
gradient of f_k. There are two models: the mean of the cohort's models, and the server's theta = mean - h/alpha, which
clients receive. Both are evaluated; `judged_by` names the one by which a run is judged (the authors plot the mean).

Deviations: the authors' code clips the loss gradient together with the linear term; here only the loss gradient is
clipped. Their code also plots the mean of all N clients' latest models, which is not kept here. Their alpha_k for
clients of unequal size is the setting `alpha_by_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedadc.errors import require
from fedadc.methods.base import Method
from fedadc.models.vectors import State, Vector
from fedadc.views.local import Local
from fedadc.views.round_info import RoundInfo
from fedadc.views.setup import Setup


@dataclass(frozen=True, kw_only=True)
class FedDyn(Method):
    """Dynamic regularization: every client keeps an estimate of its gradient, the server keeps their mean."""

    alpha: float = 0.1  # α
    alpha_by_size: bool = False  # α_k = α · mean(n) / n_k: converges to the optimum of the loss weighted by samples
    judged_by: Literal["mean", "server"] = "mean"

    paper: ClassVar[str] = "Acar et al., ICLR 2021"
    computation: ClassVar[str] = "3 vector operations / step"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.alpha < float("inf"), f"alpha must be positive and finite, not {self.alpha}.")

    @property
    def needs_sizes(self) -> bool:
        return self.alpha_by_size

    def check(self, setup: Setup) -> None:
        require(
            setup.weighting == "uniform",
            "method feddyn needs the unweighted mean of its cohort; set weighting to uniform (to weight clients by "
            "their samples, use alpha_by_size).",
        )
        require(
            not setup.resets_theta,
            "method feddyn evaluates theta + h / alpha, which is wrong after lookahead has reset theta; set "
            "ensembles.lookahead.reset to false.",
        )
        require(
            setup.exact_uplink,
            "method feddyn needs uncompressed deltas, because the server's h must stay the mean of the clients' h_k; "
            "set communication.uplink to full.",
        )
        require(
            not (setup.local.optimizer.decoupled and setup.local.weight_decay),
            "method feddyn needs weight decay in the loss, whose gradient its h_k estimates; set local.optimizer to "
            "adam or sgd, or local.weight_decay to 0.",
        )

    def client_state(self, theta: Vector) -> State:
        return {"h": torch.zeros_like(theta)}

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        return g.sub_(local.client["h"]).add_(theta - local.start, alpha=self._alpha(local))

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        delta = local.start - theta
        return {"delta": delta}, {"h": local.client["h"] + self._alpha(local) * delta}  # h_k - α_k (θ_k - θ_t)

    def server_state(self, theta: Vector) -> State:
        return {"h": torch.zeros_like(theta)}

    def grown(self, theta: Vector, server: State, before: int, now: int) -> tuple[Vector, State]:
        h = server["h"] * (before / now)  # the mean of all h_k; a new client's is 0
        return theta + (server["h"] - h) / self.alpha, {"h": h}  # the mean of the models, theta + h/α, stays

    def update(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        share = info.counted / info.clients  # share * mean over the cohort = sum over the cohort / N
        h = server["h"] + self.alpha * share * mean["delta"]
        return theta - mean["delta"] - h / self.alpha, {"h": h}

    def evaluated(self, theta: Vector, server: State) -> dict[str, Vector]:
        models = {"mean": theta + server["h"] / self.alpha, "server": theta}
        return {self.judged_by: models.pop(self.judged_by), **models}

    def _alpha(self, local: Local) -> float:
        return self.alpha * local.mean_samples / len(local.data) if self.alpha_by_size else self.alpha
