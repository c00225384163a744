"""The best model of a run by validation data: it is kept from round to round, and written beside the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedadc.config.build import TrainingPlan
from fedadc.config.ending import BEST, keeps_best
from fedadc.evaluation.stopping import BestValue
from fedadc.fields.summary import summary
from fedadc.models.vectors import Vector
from fedadc.runs.layout import BEST_MODEL
from fedadc.runs.record import model_facts, model_origin
from fedadc.server_half import ServerHalf
from fedadc.system.files import to_safetensors, write_file
from fedadc.training.state import RunState

Kept = tuple[int, Vector]  # the round of a model, and the model


class BestModel:
    """The judged model of the round with the best value so far; of equal ones, the first.

    Its round and value follow from the records, its vector is in every checkpoint. There is none if the best round was
    trained when it was not kept.
    """

    def __init__(
        self,
        federation: ServerHalf,
        metric: str | None = None,  # None: the one by which a run is judged on validation data
        history: Sequence[Mapping[str, Any]] = (),
        kept: Kept | None = None,  # in the checkpoint
        state: RunState | None = None,  # after the last round of the history
    ) -> None:
        self._federation, self._best = federation, BestValue(metric)
        for record in history:
            self._best.see(record["round"], record)
        self._vector: Vector | None = None
        if kept is not None and kept[0] == self.round:
            self._vector = kept[1]
        elif state is not None and state.round == self.round > 0:
            self._vector = self._judged(state)

    def __repr__(self) -> str:
        return summary("BestModel", {"round": self.round, str(self.metric): self.value})

    @property
    def metric(self) -> str | None:
        """The name of the metric; None before the first evaluation."""
        return self._best.metric

    @property
    def round(self) -> int:
        """The round of the best value; 0 if there is none."""
        return self._best.round

    @property
    def value(self) -> float:
        """The best value."""
        return self._best.value

    @property
    def kept(self) -> Kept | None:
        """What a checkpoint needs."""
        return None if self._vector is None else (self.round, self._vector)

    @property
    def state_dict(self) -> dict[str, Tensor] | None:
        """The best model, for `load_state_dict` of your own module; None if it was not kept."""
        return None if self._vector is None else self._federation.model.state_dict(self._vector)

    def see(self, state: RunState, metrics: Mapping[str, Any]) -> None:
        """Keep the model of a state if its metrics are the best so far."""
        if self._best.see(state.round, metrics):
            self._vector = self._judged(state)

    def _judged(self, state: RunState) -> Vector:
        return next(iter(self._federation.vectors(state).values()))

    def write(self, run: Path) -> bool:
        """Write the model into a run directory; False if the file there, if any, is not the best one."""
        file, model = run / BEST_MODEL, self.state_dict
        if model is None:
            return model_origin(file) == (BEST, self.round)
        write_file(file, to_safetensors(model, model_facts(BEST, self.round, f"{self.metric} {self.value!r}")))
        return True


def best_of(
    plan: TrainingPlan,
    history: Sequence[Mapping[str, Any]] = (),
    kept: Kept | None = None,
    state: RunState | None = None,
) -> BestModel | None:
    """The best model of a plan, going on from a history; None if the plan does not keep it."""
    if not keeps_best(plan.config, plan.federation):
        return None
    return BestModel(plan.federation, plan.config.stop.metric, history, kept, state)
