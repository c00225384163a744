"""How a run ends: whether its settings for that fit its data and its method, and whether its best model is kept."""

from __future__ import annotations

from fedadc.config.settings import Config
from fedadc.errors import FedadcError, require
from fedadc.evaluation.stopping import VALIDATION
from fedadc.server_half import ServerHalf

BEST = "best"  # the name of the best model by validation data


def keeps_best(config: Config, federation: ServerHalf) -> bool:
    """Whether a run keeps the best model by validation data beside the last one."""
    reason = ""
    if VALIDATION not in federation.counter.splits:
        reason = "there is no validation data; hold out a share with data.validation"
    elif not federation.method.federated or federation.method.headless or "personal" in (config.stop.metric or ""):
        reason = "the run is judged by the clients' own models, which are in the checkpoints"
    if config.checkpoint.best and reason:
        raise FedadcError(f"checkpoint.best: {reason}, or leave checkpoint.best out.")
    return config.checkpoint.best is not False and not reason


def check_end(config: Config, federation: ServerHalf) -> None:
    """Refuse settings of the end of a run that do not fit its data and its method."""
    federation.check_stopping(config.stop)
    if keeps_best(config, federation):
        names = federation.vectors(federation.start())
        require(
            BEST not in names,
            f"{type(federation.method).__name__} has a model {BEST!r}, the name of the best one by validation data; "
            "rename it, or set checkpoint.best to false.",
        )
