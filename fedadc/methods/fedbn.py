"""FedBN (Li et al., ICLR 2021): clients share all of a model but its BatchNorm layers, which each client keeps.

Kept are a layer's running mean and variance, which the forward pass updates, and its weight and bias, which the steps
train. In theta they keep their initial values, from which new clients start, so a run is judged by the clients' own
models only. Objectives that use predictions of the received model are refused, because that model has untrained
BatchNorm layers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedadc.errors import FedadcError, require
from fedadc.methods.base import Gradient, Method
from fedadc.models.vectors import State, Vector
from fedadc.views.local import Local
from fedadc.views.setup import Setup

log = logging.getLogger("fedadc")
ONE_SAMPLE = "a batch of one sample has no variance for BatchNorm"


@dataclass(frozen=True, kw_only=True)
class FedBN(Method):
    """FedAvg of all but the BatchNorm layers, which are each client's own."""

    paper: ClassVar[str] = "Li et al., ICLR 2021"
    travels: ClassVar[str] = "without_batch_norm"
    personalized: ClassVar[bool] = True

    def check(self, setup: Setup) -> None:
        require(
            not self.objective.asks_the_global_model,
            f"method fedbn shares no BatchNorm layers, so there is no complete global model, which objective "
            f"{type(self.objective).__name__} needs; choose another objective.",
        )
        if not setup.model.part("batch_norm").stop:
            name = type(setup.model.module).__name__
            log.warning(
                "method fedbn: %s has no BatchNorm, so it trains as fedavg does, but it is still judged by personal "
                "figures only; choose method fedavg for those of the global model", name,
            )  # fmt: skip
        elif not setup.model.accepts_one_sample(setup.example):
            alone = (setup.local.smallest_batch(setup.client_sizes) == 1).nonzero()[0]
            for client in alone[:1]:
                raise FedadcError(
                    f"method fedbn: {ONE_SAMPLE}, and client {client} would train on one; choose another "
                    "local.batch_size, or local.steps instead of epochs."
                )

    def client_state(self, theta: Vector) -> State:
        return {"batch_norm": theta}  # all of theta, which begins with the initial layers: their size is not known here

    def begin(self, local: Local) -> Vector:
        return self.personal(local.start, local.client)

    def trained(self, local: Local) -> slice:
        return slice(local.model.part("statistics").stop, None)

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        g[local.model.part("statistics")] = 0  # weight decay has added a term there
        return g

    def step(self, theta: Vector, grad: Gradient, local: Local) -> Vector:
        try:
            return super().step(theta, grad, local)
        except ValueError as error:  # torch's, at a site whose number of samples the server did not know
            if len(local.batch.y) > 1:
                raise
            raise FedadcError(f"method fedbn: {ONE_SAMPLE}; choose another local.batch_size.") from error

    def finish(self, theta: Vector, local: Local) -> tuple[State, State]:
        own, delta = local.model.part("batch_norm"), local.start - theta
        delta[own] = 0
        return {"delta": delta}, {"batch_norm": theta[own]}

    def personal(self, theta: Vector, client: State) -> Vector:
        own = client["batch_norm"]
        return torch.cat([own.to(theta.device), theta[len(own) :]])
