"""The models that clients of a run keep for themselves, from its checkpoints, and what each does on its own rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fedadc.communication.network import Communication
from fedadc.config.build import Plan, prepare
from fedadc.config.settings import CohortConfig
from fedadc.errors import DataError, require
from fedadc.evaluation.metrics import Evaluation
from fedadc.evaluation.report import OwnModelsReport, SplitReport
from fedadc.methods import Method
from fedadc.models.vectors import Vector
from fedadc.runs.checkpoint import Checkpoints
from fedadc.runs.directory import metrics_prefix
from fedadc.runs.environment import read_facts, text_of
from fedadc.runs.fingerprint import config_fingerprint
from fedadc.runs.layout import CHECKPOINTS, METRICS, MODEL
from fedadc.runs.record import RecordedRun, require_same_split
from fedadc.system.determinism import resolve_device
from fedadc.system.user_code import Notes
from fedadc.tasks import JUDGED_BY
from fedadc.training.client_states import Storage
from fedadc.training.faults import Faults
from fedadc.training.state import RunState


def last_state(run: RecordedRun, plan: Plan) -> RunState:
    """The state of the newest valid checkpoint of a run."""
    fingerprint = text_of(read_facts(run.path), "settings") or config_fingerprint(plan.config)
    checkpoints = Checkpoints(run.path / CHECKPOINTS, plan.federation, fingerprint)
    state = checkpoints.newest(lambda size: metrics_prefix(run.path / METRICS, size))
    if state is None:
        raise DataError(f"{run.path} has no checkpoint from which the clients' models could be read.")
    return state


def stored_models(method: Method, state: RunState) -> Callable[[int], Vector]:
    """The model that the method stores for a client; for a client that was never selected, its initial model."""

    def stored(client: int) -> Vector:
        client_state = state.clients[client] if client in state.clients else method.client_state(state.theta)
        return method.personal(state.theta, {name: v.to(state.theta.device) for name, v in client_state.items()})

    return stored


def has_only_own_models(run: RecordedRun, trust: bool, notes: Notes) -> bool:
    """Whether a run has no global model that could be judged, but clients' own in its checkpoints."""
    metric = next((name for record in run.records for name in JUDGED_BY if name in record), "")
    if "personal" in metric:
        return True
    return not (run.path / MODEL).is_file() and not run.config(trust=trust, notes=notes).method.federated


def reports_of_own_models(
    run: RecordedRun,
    evaluation: Callable[[Evaluation], Evaluation],  # what to count, from what the run has counted
    figures: Sequence[str],
    positive: str | None,
    data_dir: str | Path | None,
    device: str,
    trust: bool,
    notes: Notes,
) -> dict[str, SplitReport]:
    """The clients' own models, each on its client's own held-out rows, by split."""
    config = run.config(trust=trust, notes=notes)
    config = replace(  # settings that only matter for training; the files that they name may be gone
        config, storage=Storage(), cohort=CohortConfig(), faults=Faults(), communication=Communication(), clock=None,
        evaluate=evaluation(config.evaluate), model=replace(config.model, weights=None),
    )  # fmt: skip
    plan = prepare(config, data_dir, resolve_device(device))
    federation = plan.federation
    require_same_split(run.path, plan.config, federation.data)
    shares = federation.held_out_shares
    require(bool(shares), f"{run.path} has held out no rows of the clients whose models it keeps.")
    state, names, classes = last_state(run, plan), federation.client_names, federation.data.classes
    notes(f"each client's own model after round {state.round} is judged on the client's own held-out rows")
    models = stored_models(federation.method, state)
    return {
        split: OwnModelsReport.of(
            split, federation.counter, of_split, names, models, state.theta, classes, positive, tuple(figures),
            plan.config.seed,
        )
        for split, of_split in shares.items()
    }  # fmt: skip
