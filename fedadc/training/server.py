"""The server's half of a method: its state, what it sends, and its update from the mean of the uploads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedadc.errors import Diverged, FedadcError, require
from fedadc.methods.base import Method
from fedadc.models.vectors import State, Vector, canonical, pair_of, state_of, vector_like
from fedadc.objectives.base import ENSEMBLES
from fedadc.training.ensembles import Ensembles
from fedadc.views.round_info import RoundInfo

IF_DIVERGED = "lower local.lr or set local.clip."


@dataclass(frozen=True)
class Server:
    """The server of a run. Its state has the vectors of the method, the objective and the ensembles, by name."""

    method: Method
    ensembles: Ensembles

    def check_names(self, theta: Vector) -> None:
        """Refuse a name of a state that two of method, objective and ensembles use: they share one dict."""
        owners = (self.method, self.method.objective)
        for which in ("server_state", "client_state"):
            states = [state_of(getattr(o, which)(theta), f"{type(o).__name__}.{which}") for o in owners]
            for name in states[0].keys() & states[1].keys():
                names = " and ".join(type(o).__name__ for o in owners)
                raise FedadcError(f"{names} both have {name!r} in their {which}; rename one of them.")
        averages, own = self.ensembles.averages, self.method.server_state(theta)
        for name in averages.keys() & {*own, *self.method.objective.server_state(theta)}:
            raise FedadcError(f"the server's state has {name!r}, which is the name of an ensemble; rename it.")
        require(
            (self.method.federated and not self.method.headless) or not averages,
            f"{type(self.method).__name__} has no global models over which {', '.join(averages)} could average.",
        )

    def downlink(self, theta: Vector) -> tuple[str, ...]:
        """The names of the server vectors that are sent with theta: the method's and the objective's."""
        vectors = self.start(theta)
        names: dict[str, None] = {}
        for owner in (self.method, self.method.objective):
            for which in ("downlink", "tracked"):
                value, kind = getattr(owner, which, ()), type(owner).__name__
                require(isinstance(value, tuple), f"{kind}.{which} must be a tuple of names, not {value!r}.")
            for name in owner.downlink:
                self._require_vector(name, vectors, type(owner).__name__)
                names[name] = None
        return tuple(names)

    def _require_vector(self, name: str, vectors: State, owner: str) -> None:
        if name in vectors:
            return
        if name in ENSEMBLES:
            raise FedadcError(
                f"{owner} needs the ensemble {name}, which this run does not have; enable it with "
                f"ensembles: {{{name}: {{}}}}."
            )
        raise FedadcError(
            f"{owner} needs the server's {name!r}, which no server_state of {type(self.method).__name__} or "
            f"{type(self.method.objective).__name__} returns."
        )

    def start(self, theta: Vector) -> State:
        """The server's state before the first round."""
        owners = (self.method.server_state, self.method.objective.server_state, self.ensembles.start)
        return canonical({name: vector for of in owners for name, vector in of(theta).items()})

    def grown(self, theta: Vector, server: State, before: int, now: int) -> tuple[Vector, State]:
        """Theta and state when the number of all clients has grown."""
        name = f"{type(self.method).__name__}.grown"
        after, state = pair_of(self.method.grown(theta, server, before, now), name)
        return vector_like(after, theta, name), canonical({**server, **state_of(state, name)})

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
            raise Diverged(f"{where}: {name} is no longer finite, training has diverged; {IF_DIVERGED}")
