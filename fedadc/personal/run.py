"""Personalization of one run: the models of its clients, and how good they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedadc.communication.network import Communication
from fedadc.config.build import prepare
from fedadc.config.settings import CohortConfig, Config
from fedadc.errors import require
from fedadc.methods import FedAvg, Method
from fedadc.models.build import read_weights
from fedadc.models.vectors import Vector
from fedadc.objectives import default_objective
from fedadc.personal.calibrate import ClientTuner, Models, tuned_part
from fedadc.personal.folder import PersonalFolder
from fedadc.personal.request import Request, client_numbers, summary_text
from fedadc.personal.results import ClientTotal, ResultRow
from fedadc.personal.shares import Shares, changed_shares, shares_of
from fedadc.runs.environment import read_facts, text_of
from fedadc.runs.own_models import last_state, stored_models
from fedadc.runs.record import RecordedRun, model_origin, require_same_split, saved_model
from fedadc.training.client_states import Storage
from fedadc.training.ensembles import Ensembles
from fedadc.training.faults import Faults

Watcher = Callable[[str, int], None]  # called after every client with the run's label and the number of clients
GLOBAL = ""  # the variant that is no client's


@dataclass(frozen=True)
class PersonalRun:
    """A run, and everything that is needed to compute and evaluate the models of its clients."""

    label: str
    round: int
    model: str | None  # the file name of the global model; None if there is none
    comparable: bool  # True if the global model can be evaluated; a body without a trained head cannot
    request: Request
    tuner: ClientTuner
    stored: Callable[[int], Vector] | None  # a client's model, if the method stores one; None: it is calibrated
    shares: Shares
    new_shares: Shares | None  # if the clients' data has changed

    def personalize_clients(self, folder: PersonalFolder, watch: Watcher | None) -> list[ResultRow]:
        """Compute the models of every client, save them in the folder, and evaluate them."""
        rows: dict[tuple[str, str], ResultRow] = {}
        clients, differing = self._clients(), self.stored is not None and self.model is not None
        for client in clients:
            for phase, variant, theta, total in self._personalize_client(client):
                row = ResultRow(self.label, variant, phase, task=type(self.tuner.agreement.task))
                rows.setdefault((variant, phase), row).totals.append(total)
                if theta is not None:
                    folder.add_model(variant, client, self.tuner.tuned(theta, differing))
            if watch:
                watch(self.label, len(clients))
        variants = self._variants()
        return sorted(rows.values(), key=lambda row: variants.index(row.regularizer))

    def _variants(self) -> list[str]:
        return list(dict.fromkeys(self.request.regularizers)) if self.stored is None else ["own"]

    def _clients(self) -> list[int]:
        """The requested clients; if the data has changed, those of them that have training samples in the new data."""
        clients = client_numbers(self.request.clients, self.shares.names)
        new = self.new_shares
        clients = clients if new is None else [k for k in clients if len(new.clients[k])]
        require(bool(clients), "none of the requested clients has a training sample.")
        return clients

    def _personalize_client(self, client: int) -> Iterator[tuple[str, str, Vector | None, ClientTotal]]:
        """(phase, variant, model or None if it is not saved, how good it is) of each model of a client."""
        models, new = self._models(client, self.shares), self.new_shares
        for variant, total in self._evaluate(client, models, self.shares):
            yield ("" if new is None else "before"), variant, models[variant] if new is None else None, total
        if new is None:
            return
        for variant, total in self._evaluate(client, models, new):
            yield "after", variant, models[variant] if self.stored else None, total
        if self.stored is None:
            models = self._models(client, new)
            for variant, total in self._evaluate(client, models, new):
                yield "recalibrated", variant, models[variant], total

    def _models(self, client: int, shares: Shares) -> Models:
        """The models of a client, calibrated on its training share unless the method stores them."""
        if self.stored is not None:
            return {"own": self.stored(client)}
        return self.tuner.models(client, shares.train, shares.clients[client])

    def _evaluate(self, client: int, models: Models, shares: Shares) -> Iterator[tuple[str, ClientTotal]]:
        """How good each of these models is on the client's test share."""
        train, tests = len(shares.clients[client]), shares.tests[client]
        judged = {**models, **({GLOBAL: self.tuner.part.start} if self.comparable else {})}
        totals = self.tuner.totals(judged, shares.test, tests)
        for variant in models:
            found = train, len(tests), totals[variant], totals.get(GLOBAL)
            yield variant, ClientTotal(client, shares.names[client], *found)

    def summary(self, rows: Sequence[ResultRow]) -> str:
        """The content of summary.json."""
        calibration = None if self.stored else self.tuner.calibration
        return summary_text(self.label, self.round, self.model, self.request, calibration, rows)


def stores_models(method: Method) -> bool:
    """True if the method itself stores a model for each client, as FedPer and local_only do."""
    return type(method).personal is not Method.personal


def start_file(run: RecordedRun, config: Config, name: str | None) -> Path | None:
    """The file of the model from which the clients calibrate; None if the method stores a model for each client."""
    if not stores_models(config.method):
        return saved_model(run, name)
    require(name is None, f"`model` does not apply to {run.path}: its method stores a model for each client.")
    return None


def personal_run(
    run: RecordedRun,
    config: Config,
    file: Path | None,
    label: str,
    request: Request,
    data_dir: str | Path | None,
    device: str,
) -> PersonalRun:
    """Prepare the personalization of a run; `file` is the model to start from, or None for stored models."""
    folder = data_dir or text_of(read_facts(run.path), "data_dir")
    data_folder = None if folder is None else Path(folder)
    config = replace(  # settings that only matter for training; the files that they name may be gone
        config, storage=Storage(), cohort=CohortConfig(), faults=Faults(), communication=Communication(), clock=None
    )
    if file is not None:
        model = replace(config.model, weights=None)
        objective = default_objective(config.task_name)
        config = replace(config, model=model, method=FedAvg(), objective=objective, ensembles=Ensembles())
    plan = prepare(config, data_folder, device)
    require_same_split(run.path, plan.config, plan.federation.data)
    shares = shares_of(plan)
    new_shares = None if request.data is None else changed_shares(request.data, plan, shares, data_folder)
    federation, batch_size = plan.federation, plan.federation.evaluation.batch_size
    agreement, stored = federation.agreement, None
    if file is None:
        state, method = last_state(run, plan), config.method
        main, stored = next(iter(federation.vectors(state).values()), state.theta), stored_models(method, state)
        part, round = tuned_part(agreement, main, "all", batch_size), state.round
        name, comparable = saved_model(run).name if method.federated else None, method.federated and not method.headless
    else:
        federation.load_state_dict(read_weights(file), str(file))
        theta, round = federation.start().theta, model_origin(file)[1]
        part = tuned_part(agreement, theta, request.layers, batch_size)
        name, comparable = file.name, True
    tuner = ClientTuner(part, agreement, request.calibration(plan.config), request.regularizers)
    return PersonalRun(label, round, name, comparable, request, tuner, stored, shares, new_shares)
