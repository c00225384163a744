"""A federation as its server sees it, wherever the clients are: it trains, evaluates, and knows the models of a state.

`Federation` simulates the clients; `fedadc.sites` reaches real ones. Neither this class nor a state of a run has a
sample of a client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from fedadc.data.dataset import Clients
from fedadc.data.schema import DataSchema
from fedadc.engines.base import Engine
from fedadc.errors import require
from fedadc.evaluation.evaluator import Evaluator, models_of
from fedadc.evaluation.metrics import Evaluation, MetricCounter
from fedadc.evaluation.stopping import VALIDATION, Stopper, Stopping, validation_metrics
from fedadc.methods import Method
from fedadc.models.flat import FlatModel
from fedadc.training.agreement import Agreement
from fedadc.training.client_states import Storage
from fedadc.training.coordinator import Coordinator
from fedadc.training.rounds import train, with_events
from fedadc.training.state import Metrics, Round, RunState


class ServerHalf(ABC):
    """What a run needs of a federation: `rounds`, and the models of every state."""

    agreement: Agreement
    coordinator: Coordinator
    counter: MetricCounter  # with the test and validation samples that the server has
    engine: Engine  # runs the clients
    evaluation: Evaluation
    storage: Storage
    slow_start = ""  # what happens first, if it takes some seconds

    @property
    @abstractmethod
    def notes(self) -> tuple[str, ...]:
        """Remarks on the data for the user."""

    @property
    @abstractmethod
    def engine_facts(self) -> dict[str, Any]:
        """Where the clients are trained, for the record of a run."""

    @abstractmethod
    def data_checksum(self) -> str:
        """A checksum of all data that a run depends on, and of the parts of the model that are not trained."""

    @property
    @abstractmethod
    def data_schema(self) -> DataSchema:
        """How inputs are prepared for the model, and the classes."""

    @property
    @abstractmethod
    def samples_of_splits(self) -> dict[str, int]:
        """How many samples each split has, at all clients together, as far as the server knows."""

    @property
    def method(self) -> Method:
        return self.agreement.method

    @property
    def model(self) -> FlatModel:
        return self.agreement.model

    @property
    def client_names(self) -> tuple[str, ...]:
        """The names of the clients in the data, or else their numbers."""
        return self.coordinator.roster.names

    @property
    def personal_shares(self) -> Mapping[str, Clients]:
        """Each client's share of every split, if the clients' own models are evaluated here."""
        return {}

    @property
    def evaluator(self) -> Evaluator:
        ensembles, clients = self.agreement.server.ensembles, len(self.coordinator.roster)
        return Evaluator(self.method, ensembles, clients, self.counter, self.engine.count, self.personal_shares)

    def close(self) -> None:
        """End the worker processes, if there are any; they are started again when they are needed."""
        self.engine.close()

    def start(self) -> RunState:
        """The state before the first round."""
        return self.coordinator.start(self.storage)

    def rounds(
        self,
        rounds: int,
        start: RunState | None = None,
        stop_at_accuracy: float | None = None,
        trusted: bool = False,
        *,
        stop: Stopping | None = None,
        history: Iterable[Round | Mapping[str, Any]] = (),
    ) -> Iterator[Round]:
        """Train up to round `rounds`, from the beginning or from a state of an earlier round.

        Unless a state is `trusted`, it is checked to fit this federation. `stop` may end training early;
        `stop_at_accuracy` is short for it. From a state of an earlier round, its patience needs the `history`: the
        results or the records of the rounds before.
        """
        first = self.start() if start is None else start
        kind = type(first).__name__
        require(isinstance(first, RunState), f"start must be a RunState (a Round's .state), not a {kind}.")
        require(
            trusted or self.coordinator.fits(first),
            "start is the state of another model or method; pass a state of this federation.",
        )
        require(
            isinstance(rounds, Integral) and not isinstance(rounds, bool) and rounds >= max(1, first.round),
            f"rounds must be a whole number, at least {max(1, first.round)}, not {rounds!r}.",
        )
        folder = self.storage.folder
        require(folder is None or Path(folder).is_dir(), f"storage.folder: there is no folder {folder}.")
        require(
            stop_at_accuracy is None or (isinstance(stop_at_accuracy, int | float) and 0 < stop_at_accuracy <= 1),
            f"stop_at_accuracy must be in (0, 1], not {stop_at_accuracy!r:.60}.",
        )
        require(stop is None or stop_at_accuracy is None, "give stop or stop_at_accuracy, not both.")
        stopper = self._stopper(stop or Stopping(accuracy=stop_at_accuracy), rounds, history)
        first = replace(first, clients=first.clients.kept_in(self.storage))
        evaluated = self.evaluator.follow(train(self.coordinator, self.engine.run, rounds, first), rounds)
        return stopper.follow(self._completed(with_events(evaluated, self.engine.take_events)))

    def _stopper(self, stop: Stopping, rounds: int, history: Iterable[Round | Mapping[str, Any]]) -> Stopper:
        """What decides when to stop, having seen the rounds of a history."""
        require(isinstance(stop, Stopping), f"stop must be a Stopping, not {stop!r:.60}.")
        self.check_stopping(stop)
        stopper = Stopper(stop, self.evaluation, rounds)
        for seen in history:
            number, metrics = (seen.round, seen.metrics) if isinstance(seen, Round) else (seen["round"], seen)
            stopper.see(number, metrics)
        return stopper

    def check_stopping(self, stop: Stopping) -> None:
        """Refuse patience that nothing could decide, and a metric that is not measured."""
        require(
            stop.patience is None or VALIDATION in self.counter.splits,
            "stop.patience needs validation data; hold out a share with data.validation, such as 0.1 (in Python "
            "validation=0.1), or leave stop.patience out.",
        )
        names = validation_metrics(self.method, self.evaluation, type(self.counter.task))
        require(
            stop.metric is None or stop.metric in names,
            f"stop.metric: {stop.metric} is not measured; these are: {', '.join(names)} (see evaluate.metrics).",
        )

    def _completed(self, stream: Iterator[Round]) -> Iterator[Round]:
        """The same rounds, with what a kind of federation has to add to them."""
        return stream

    def evaluate(self, state: RunState) -> Metrics:
        """Metrics of a state on all test and validation samples, e.g. test_accuracy and test_loss."""
        self._require_fitting(state)
        return self.evaluator(state)

    def _require_fitting(self, state: RunState) -> None:
        kind = type(state).__name__
        require(isinstance(state, RunState), f"state must be a RunState (a Round's .state), not {kind}.")
        require(self.coordinator.fits(state), "state is of another model or method; pass a state of this federation.")

    def load_state_dict(self, state: dict[str, torch.Tensor], source: str) -> None:
        """Start from given weights instead of the module's own."""
        self.agreement.load_weights(state, source)
        self.engine.close()  # workers have the old weights

    def state_dict(self, state: RunState) -> dict[str, torch.Tensor]:
        """The judged model of a state, for `load_state_dict` of your own module."""
        require(self.method.federated, f"{type(self.method).__name__} has no global model; see state.clients.")
        return next(iter(self.models(state).values()))

    def models(self, state: RunState) -> dict[str, dict[str, torch.Tensor]]:
        """The state dicts of all models of a state by name, first the judged one."""
        return {name: self.model.state_dict(vector) for name, vector in self.vectors(state).items()}

    def vectors(self, state: RunState) -> dict[str, torch.Tensor]:
        """All models of a state as flat vectors, first the judged one."""
        return models_of(self.method, self.agreement.server.ensembles, state)
