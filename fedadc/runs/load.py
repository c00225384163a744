"""`fedadc.load`: the trained model of a run, ready for use."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedadc.config.build import prepare
from fedadc.config.settings import Config
from fedadc.evaluation.frames import History
from fedadc.federation import Federation
from fedadc.fields.summary import summary
from fedadc.models.build import read_weights
from fedadc.runs.record import TRAINING_ONLY, read_run, saved_model, scores
from fedadc.system.determinism import resolve_device
from fedadc.system.user_code import Notes
from fedadc.training.client_states import Storage

log = logging.getLogger("fedadc")


@dataclass(frozen=True)
class LoadedRun:
    """A run that was trained: its config, its history and its model."""

    path: Path
    config: Config
    history: History  # one record per round, as in metrics.jsonl; `.to_pandas()`
    classes: tuple[str, ...]
    federation: Federation  # of the run's data and model

    @property
    def module(self) -> torch.nn.Module:
        """A copy of the trained module, in evaluation mode. It needs normalized inputs; `predict` takes raw ones."""
        module = copy.deepcopy(self.federation.model.module)
        module.load_state_dict(self.federation.model.state_dict(self.federation.agreement.start))
        return module.eval()

    def predict(self, x: Any) -> torch.Tensor:
        """The logits of inputs like those of the run's data, [n, classes]; `.argmax(1)` are positions in `classes`."""
        return self.federation.predict(self.federation.start(), x)

    def __repr__(self) -> str:
        last = self.history[-1]
        facts = {"data": self.config.data.name, "classes": len(self.classes), "round": last["round"], **scores(last)}
        return summary("LoadedRun", {"path": self.path, **facts})


def load(
    run: str | Path,
    *,
    model: str | None = None,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    trust: bool = False,
    notes: Notes = log.info,
) -> LoadedRun:
    """Load the model of a run directory; the run's data must be there, because it says how inputs are prepared.

    `model` is the name of another model of the run (model-NAME.safetensors), e.g. ema. User code is loaded if it is as
    the run has sealed it, or with `trust`.
    """
    recorded = read_run(Path(run))
    config, file = recorded.config(TRAINING_ONLY, trust, notes), saved_model(recorded, model)
    config = replace(config, model=replace(config.model, weights=None), storage=Storage())
    plan = prepare(config, data_dir, resolve_device(device))
    plan.federation.load_state_dict(read_weights(file), str(file))
    return LoadedRun(
        recorded.path, plan.config, History(recorded.records), plan.federation.data.classes, plan.federation
    )
