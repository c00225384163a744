"""A run whose clients are to have models of their own: how they are made, and what they get right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedadc.communication.network import Communication
from fedadc.config.build import Plan, prepare
from fedadc.config.settings import CohortConfig, Config
from fedadc.errors import FedadcError, require
from fedadc.methods import FedAvg, Method
from fedadc.models.build import read_weights
from fedadc.models.vectors import Vector
from fedadc.objectives import CrossEntropy
from fedadc.personal.calibrate import Calibration, TunedPart, calibrated, tuned_part
from fedadc.personal.folder import PersonalFolder
from fedadc.personal.request import Request, client_numbers
from fedadc.personal.results import ClientAccuracy, ResultRow
from fedadc.personal.shares import Shares, changed_shares, shares_of
from fedadc.runs.checkpoint import Checkpoints
from fedadc.runs.directory import metrics_prefix
from fedadc.runs.environment import read_facts, text_of
from fedadc.runs.fingerprint import config_fingerprint
from fedadc.runs.layout import CHECKPOINTS as CHECKPOINTS
from fedadc.runs.layout import METRICS
from fedadc.runs.record import RecordedRun, model_origin, saved_model
from fedadc.training.client_states import Storage
from fedadc.training.ensembles import Ensembles
from fedadc.training.faults import Faults
from fedadc.training.state import RunState

Watcher = Callable[[str, int], None]  # called after every client with the run and how many clients there are
Models = dict[str, Vector]  # a client's own, by regularizer


@dataclass(frozen=True)
class PersonalRun:
    """A run whose clients are to have their own models."""

    label: str
    round: int
    model: str | None  # the file of the global one
    compares: bool  # whether that is a model to compare with, and not a body without a trained head
    request: Request
    plan: Plan
    part: TunedPart  # what differs from client to client
    own: Callable[[int], Vector] | None  # of a method that keeps models at its clients
    calibration: Calibration
    shares: Shares
    after: Shares | None  # the change

    def measured(self, folder: PersonalFolder, watch: Watcher | None) -> list[ResultRow]:
        """Make every client's models, keep them, and count what they get right."""
        rows: dict[tuple[str, str], ResultRow] = {}
        clients = self._clients()
        for client in clients:
            for moment, way, theta, count in self._of_client(client):
                rows.setdefault((way, moment), ResultRow(self.label, way, moment)).counts.append(count)
                if theta is not None:
                    folder.keep(way, client, self._tuned(theta))
            if watch:
                watch(self.label, len(clients))
        ways = self._ways()
        return sorted(rows.values(), key=lambda row: ways.index(row.regularizer))

    def _ways(self) -> list[str]:
        return list(dict.fromkeys(self.request.regularizers)) if self.own is None else ["own"]

    def _clients(self) -> list[int]:
        """Those asked for that hold something, now too if their data has changed."""
        found = client_numbers(self.request.clients, self.shares.names)
        after = self.after
        found = found if after is None else [k for k in found if len(after.clients[k])]
        require(bool(found), "none of the clients holds a training sample now.")
        return found

    def _of_client(self, client: int) -> Iterator[tuple[str, str, Vector | None, ClientAccuracy]]:
        """Moment, regularizer, the model if it is to be kept, and what it gets right."""
        models, after = self._models(client, self.shares), self.after
        for way, count in self._counted(client, models, self.shares):
            yield ("" if after is None else "before"), way, models[way] if after is None else None, count
        if after is None:
            return
        for way, count in self._counted(client, models, after):
            yield "after", way, models[way] if self.own else None, count
        if self.own is None:
            models = self._models(client, after)
            for way, count in self._counted(client, models, after):
                yield "recalibrated", way, models[way], count

    def _models(self, client: int, shares: Shares) -> Models:
        if self.own is not None:
            return {"own": self.own(client)}
        place, work = self.plan.federation.context, self.calibration.work
        seen = self.part.seen(shares.train, shares.clients[client])
        return {
            way: calibrated(self.part, place, client, seen, work, self.calibration.method(way)) for way in self._ways()
        }

    def _counted(self, client: int, models: Models, shares: Shares) -> Iterator[tuple[str, ClientAccuracy]]:
        train, tests = len(shares.clients[client]), shares.tests[client]
        seen = self.part.seen(shares.test, tests) if len(tests) else None
        of_global = None if not self.compares else 0 if seen is None else self.part.right(self.part.start, seen)
        for way, theta in models.items():
            right = 0 if seen is None else self.part.right(theta, seen)
            yield way, ClientAccuracy(client, shares.names[client], train, len(tests), right, of_global)

    def _tuned(self, theta: Vector) -> dict[str, Tensor]:
        """What a client's model does not share with the global one."""
        state = self.part.state_dict(theta)
        if self.own is None or self.model is None:
            return state
        shared = self.part.state_dict(self.part.start)
        return {name: tensor for name, tensor in state.items() if not torch.equal(tensor, shared[name])}

    def summary(self, rows: Sequence[ResultRow]) -> str:
        """The settings and figures as a file has them."""
        work, request = self.calibration.work, self.request
        known = ("epochs", "batch_size", "lr", "momentum", "weight_decay", "clip")
        settings = {
            **{name: getattr(work, name) for name in known},
            "mu": self.calibration.mu,
            "lam": self.calibration.lam,
        }
        tree = {
            "run": self.label,
            "model": self.model,
            "round": self.round,
            "data": None if request.data is None else str(request.data),
            **({} if self.own else {"layers": request.layers, "settings": settings}),
            "rows": [row.as_dict() for row in rows],
        }
        return json.dumps(tree, indent=2) + "\n"


def keeps_models(method: Method) -> bool:
    """Whether a method has personal models of its own."""
    return type(method).personal is not Method.personal


def file_of(run: RecordedRun, config: Config, name: str | None) -> Path | None:
    """The model that a run's clients start from; None where its method keeps their models."""
    if not keeps_models(config.method):
        return saved_model(run, name)
    require(name is None, f"--model: the clients of {run.path} have models of their own, which start from no other.")
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
    folder = data_dir or text_of(read_facts(run.path), "data_dir")
    place = None if folder is None else Path(folder)
    config = replace(  # how it was trained is of no account now
        config, storage=Storage(), cohort=CohortConfig(), faults=Faults(), communication=Communication(), clock=None
    )
    if file is not None:
        plain = replace(config.model, weights=None)
        config = replace(config, model=plain, method=FedAvg(), objective=CrossEntropy(), ensembles=Ensembles())
    plan = prepare(config, place, device)
    shares = shares_of(plan)
    after = None if request.data is None else changed_shares(request.data, plan, shares, place)
    calibration, federation = request.calibration(plan.config), plan.federation
    models = None
    if file is None:
        state, method = _last_state(run, plan), config.method
        judged, models = next(iter(federation.vectors(state).values()), state.theta), _own_models(method, state)
        part, round = tuned_part(federation, judged, "all"), state.round
        name, compares = saved_model(run).name if method.federated else None, method.federated and not method.headless
    else:
        federation.load_state_dict(read_weights(file), str(file))
        part, round = tuned_part(federation, federation.start().theta, request.layers), model_origin(file)[1]
        name, compares = file.name, True
    return PersonalRun(label, round, name, compares, request, plan, part, models, calibration, shares, after)


def _last_state(run: RecordedRun, plan: Plan) -> RunState:
    """Of a run's newest good checkpoint."""
    mark = text_of(read_facts(run.path), "settings") or config_fingerprint(plan.config)
    checkpoints = Checkpoints(run.path / CHECKPOINTS, plan.federation, mark)
    state = checkpoints.newest(lambda size: metrics_prefix(run.path / METRICS, size))
    if state is None:
        raise FedadcError(f"{run.path} has no checkpoint, in which its clients' own models would be.")
    return state


def _own_models(method: Method, state: RunState) -> Callable[[int], Vector]:
    """What a method keeps at its clients; one that was never selected has what it would begin with."""

    def of(client: int) -> Vector:
        kept = state.clients[client] if client in state.clients else method.client_state(state.theta)
        return method.personal(state.theta, {name: v.to(state.theta.device) for name, v in kept.items()})

    return of
