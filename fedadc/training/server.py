"""The server's update after a round, from the mean of the uploads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedadc.errors import Diverged, FedadcError
from fedadc.methods.base import Method
from fedadc.models.vectors import State, Vector, canonical, pair_of, state_of, vector_like
from fedadc.training.ensembles import Ensembles
from fedadc.views.round_info import RoundInfo

ADVICE = "lower local.lr or set local.clip."


@dataclass(frozen=True)
class Server:
    """Its state has the vectors of the method, the objective and the ensembles, by name."""

    method: Method
    ensembles: Ensembles

    def start(self, theta: Vector) -> State:
        owners = (self.method.server_state, self.method.objective.server_state, self.ensembles.start)
        return canonical({name: vector for of in owners for name, vector in of(theta).items()})

    def updated(self, theta: Vector, server: State, mean: State | None, info: RoundInfo) -> tuple[Vector, State]:
        """Theta and state after a round. Without a mean, no upload was counted: only the ensembles move on."""
        if mean is None:
            after, followed = self.ensembles.follow(theta, server, info.round)
            return after, canonical({**server, **followed})
        after, state = self._updated(theta, server, mean, info)
        after, followed = self.ensembles.follow(after, server, info.round)
        state = canonical({**state, **self._remembered(after, server, info), **followed})
        _require_finite({"theta": after, **state}, f"round {info.round}")
        return after, state

    def _updated(self, theta: Vector, server: State, mean: State, info: RoundInfo) -> tuple[Vector, State]:
        """The method's update, with its return values checked."""
        name = f"{type(self.method).__name__}.update"
        try:
            after, state = pair_of(self.method.update(theta, server, mean, info), name)
        except KeyError as error:
            known = f"the uploads have {', '.join(mean) or 'nothing'}"
            raise FedadcError(f"{name} looks for {error}, but {known}.") from error
        return vector_like(after, theta, name), state_of(state, name)

    def _remembered(self, theta: Vector, server: State, info: RoundInfo) -> State:
        objective = self.method.objective
        return state_of(objective.follow(theta, server, info), f"{type(objective).__name__}.follow")


def _require_finite(vectors: State, where: str) -> None:
    for name, vector in vectors.items():
        if not bool(torch.isfinite(vector).all()):
            raise Diverged(f"{where}: {name} is no longer finite, training has diverged; {ADVICE}")
