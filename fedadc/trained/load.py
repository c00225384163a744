"""`fedadc.load`: the trained model of a run, or a client's own model, ready for use. The run's data is not needed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedadc.config.build import build_agreement, complete, load_data, prepare
from fedadc.config.settings import AT_SITES, Config
from fedadc.data.dataset import Array, Samples
from fedadc.data.schema import DataSchema
from fedadc.errors import DataError, FedadcError, require
from fedadc.evaluation.frames import History
from fedadc.federation import Federation
from fedadc.fields.summary import summary
from fedadc.models import MODELS
from fedadc.models.build import read_weights
from fedadc.personal.folder import personal_state_dict
from fedadc.personal.run import stores_models
from fedadc.rng import torch_seeded
from fedadc.runs.environment import read_facts, text_of
from fedadc.runs.layout import MODEL, PREPROCESSING
from fedadc.runs.preprocessing import Preprocessing, read_preprocessing
from fedadc.runs.record import TRAINING_ONLY, RecordedRun, model_origin, read_run, saved_model, scores
from fedadc.system.determinism import deterministic, resolve_device
from fedadc.system.user_code import Notes
from fedadc.tasks import JUDGED_BY
from fedadc.trained.clients import client_number, require_states_here, stored_model
from fedadc.trained.new_data import read_new_data
from fedadc.trained.predictions import Predictions
from fedadc.training.agreement import Agreement
from fedadc.training.client_states import Storage

log = logging.getLogger("fedadc")
FOR_TRAINING = tuple(key for key in TRAINING_ONLY if key not in ("method", "objective", "communication"))
Watcher = Callable[[int, int], None]  # called with the number of rows that are predicted, and of all rows


@dataclass(frozen=True)
class LoadedRun:
    """A run that was trained: its config, its history, one of its models, and how inputs are prepared for it."""

    path: Path
    config: Config
    history: History  # one record per round, as in metrics.jsonl; `.to_pandas()`
    recorded: Preprocessing = field(repr=False)
    agreement: Agreement = field(repr=False)  # with the weights of the model
    tree: dict[str, Any] = field(repr=False)  # the whole config as plain values; `config` may lack what only trains
    round: int  # after which the model was saved; 0: not known
    model: str | None = None  # its name; None: the one by which the run is judged
    client: str | None = None  # whose own model it is
    data_dir: Path | None = field(default=None, repr=False)

    @property
    def preprocessing(self) -> DataSchema:
        """How new data is prepared: shape, type, classes, normalization, and the encoding of a table's columns."""
        return self.recorded.schema

    @property
    def classes(self) -> tuple[str, ...]:
        return self.preprocessing.classes

    @property
    def module(self) -> torch.nn.Module:
        """A copy of the trained module, in evaluation mode. It needs normalized inputs; `predict` takes raw ones."""
        module = copy.deepcopy(self.agreement.model.module)
        module.load_state_dict(self.state_dict)
        return module.eval()

    @property
    def state_dict(self) -> dict[str, Tensor]:
        """The weights of the module."""
        return self.agreement.model.state_dict(self.agreement.start)

    @cached_property
    def federation(self) -> Federation:
        """The simulated federation of the run's data and model; the data must be there."""
        config = replace(self.config, model=replace(self.config.model, weights=None), storage=Storage())
        plan = prepare(config, self.data_dir, str(self.agreement.model.device))
        plan.federation.load_state_dict(self.state_dict, str(self.path))
        return plan.federation

    def predict(self, data: Any, watch: Watcher | None = None) -> Predictions:
        """Predict rows without labels: a path, a DataFrame, a dict of columns, or an array or tensor of raw inputs.

        For a table, an array has the columns of training in their order, all of them numbers. `Samples` of a data set
        are taken as they are.
        """
        new = read_new_data(data, self.preprocessing)
        return Predictions(self._outputs(new.samples, watch), self.preprocessing.spec, new.rows, new.notes)

    def logits(self, x: Any) -> Tensor:
        """The outputs for an array of raw inputs, [n, classes]; `.argmax(1)` are positions in `classes`."""
        return torch.from_numpy(self.predict(x).outputs)

    @property
    def batch_size(self) -> int:
        """Predictions are made in batches of this size, as in evaluation; other sizes change the last bits."""
        return self.config.evaluate.batch_size

    def require_head(self) -> None:
        """Refuse the global model of a method whose clients alone have trained heads."""
        require(
            self.client is not None or not judged_by_own_models(self.history),
            f"{self.path} has no global model that could predict, because each client has its own; give `client`.",
        )

    def _outputs(self, samples: Samples, watch: Watcher | None) -> Array:
        self.require_head()
        model, outputs = self.agreement.model, []
        with deterministic():
            for batch in self.agreement.client_data(samples).in_order(None, self.batch_size):
                first = int(batch.position[0])
                with torch_seeded(0, "evaluation", client=first):  # as `MetricCounter` does it
                    outputs.append(model.predict(self.agreement.start, batch.x).cpu())
                if watch:
                    watch(first + len(batch.position), len(samples))
        empty = np.zeros((0, *self.preprocessing.spec.task.outputs), np.float32)
        found: Array = torch.cat(outputs).numpy() if outputs else empty
        return found

    def __repr__(self) -> str:
        last = self.history[-1]
        outputs = {"classes": len(self.classes)} if self.classes else {"targets": len(self.preprocessing.targets)}
        facts = {"data": self.config.data.name, **outputs, "round": last["round"], **scores(last)}
        own = {} if self.client is None else {"client": self.client}
        return summary("LoadedRun", {"path": self.path, **facts, **own})


def judged_by_own_models(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run has no global model that could predict, because clients alone have trained heads."""
    metric = next((name for record in records for name in JUDGED_BY if name in record), "")
    return "personal" in metric


def load(
    run: str | Path,
    *,
    model: str | None = None,
    client: str | int | None = None,
    regularizer: str | None = None,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    trust: bool = False,
    notes: Notes = log.info,
) -> LoadedRun:
    """Load the model of a run directory, or with `client` (a name or a number) a client's own model.

    `model` is the name of another model of the run (model-NAME.safetensors), e.g. best or ema. A client's own model is
    the one that the method keeps, or else the one that `personalize` has saved; `regularizer` says which, if it has
    saved several. User code is loaded if it is as the run has sealed it, or with `trust`.
    """
    recorded, device = read_run(Path(run)), resolve_device(device)
    own_only = client is not None or judged_by_own_models(recorded.records)
    config = recorded.config(FOR_TRAINING if own_only else TRAINING_ONLY, trust, notes)
    folder = data_dir or text_of(read_facts(recorded.path), "data_dir")
    data_folder = None if folder is None else Path(folder)
    known, samples = _preprocessing(recorded, config, data_folder, notes)
    agreement = _agreement(recorded, config, known, samples, device)
    if client is None:
        file = saved_model(recorded, model)
        _load_weights(agreement, read_weights(file), file)
        round = model_origin(file)[1]
    else:
        require(model is None, "`model` does not apply to the own model of a client; leave it out.")
        client, round = _load_own_model(recorded, config, known, agreement, client, regularizer)
        if known.schema.encoding is not None:
            own = known.schema.encoding.of_client(client)
            known = replace(known, schema=replace(known.schema, encoding=own))
    return LoadedRun(
        recorded.path,
        config,
        History(recorded.records),
        known,
        agreement,
        recorded.tree,
        round,
        model,
        client,
        data_folder,
    )


def _preprocessing(
    recorded: RecordedRun, config: Config, data_dir: Path | None, notes: Notes
) -> tuple[Preprocessing, Samples | None]:
    """What the run has saved; of a run of an earlier version, what its data says, and training samples."""
    path = recorded.path
    known = read_preprocessing(path)
    if known is not None:
        return known, None
    reason = f"{path} has no {PREPROCESSING}, because an earlier version of fedadc wrote it"
    require(config.data.name != AT_SITES, f"{reason}; start the federation's server again, which writes it.", DataError)
    try:
        data = load_data(complete(config), data_dir)[1]
    except FedadcError as error:
        resume = f"`fedadc resume {path}` writes it where the data is"
        raise DataError(f"{reason}, and its data cannot be loaded ({str(error).rstrip('.')}); {resume}.") from error
    notes(f"{reason}: the run's data was loaded instead")
    return Preprocessing(
        DataSchema.of(data), None, {name: len(part) for name, part in data.splits().items()}
    ), data.train


def _agreement(
    recorded: RecordedRun, config: Config, known: Preprocessing, samples: Samples | None, device: str
) -> Agreement:
    """The run's model, still with its first weights."""
    if (recorded.path / MODEL).is_file():
        config = replace(config, model=replace(config.model, weights=None))
    config.schema.lookup("model", config.model.name, MODELS)  # refuses user code that is not sealed
    try:
        return build_agreement(complete(config), known.schema.spec, samples, device)
    except FedadcError as error:
        raise DataError(f"the model of {recorded.path} does not fit its {PREPROCESSING}: {error}") from error


def _load_weights(agreement: Agreement, state: dict[str, Tensor], file: Path) -> None:
    try:
        agreement.load_weights(state, str(file))
    except FedadcError as error:
        raise DataError(f"{error} Or {PREPROCESSING} belongs to another run.") from error


def _load_own_model(
    recorded: RecordedRun,
    config: Config,
    known: Preprocessing,
    agreement: Agreement,
    client: str | int,
    regularizer: str | None,
) -> tuple[str, int]:
    """Load a client's own model; returns the client's name, and the round after which the model was saved."""
    path, model = recorded.path, recorded.path / MODEL
    number = client_number(client, known.clients, config.data.clients)
    name = str(number) if known.clients is None else known.clients[number]
    if model.is_file():
        _load_weights(agreement, read_weights(model), model)
    if not stores_models(config.method):
        _load_weights(agreement, personal_state_dict(path, number, regularizer), path)
        return name, model_origin(model)[1]
    facts = read_facts(path)
    require_states_here(path, text_of(facts, "engine") == AT_SITES)
    theta, round = stored_model(path, agreement, number, text_of(facts, "settings"))
    for vector in (agreement.model.theta, agreement.start):
        vector.copy_(theta)
    return name, round
