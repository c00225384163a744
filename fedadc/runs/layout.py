"""The file names in a run directory. They are defined only here.

RUN/config.yaml                             the complete config
RUN/metrics.jsonl                           one record per round
RUN/environment.json                        what the result depends on besides the config
RUN/preprocessing.json                      how inputs are prepared, the classes, the names of the clients
RUN/trace.jsonl                             real sites: who joined, was absent or did not count, for faults.trace
RUN/sites.json                              real sites: what was agreed on, with the sites that have joined later
RUN/seal.json                               the user code that the run has loaded, sealed with its user's key
RUN/model.safetensors                       the final model by which the run is judged
RUN/model-best.safetensors                  the best model by validation data; its metadata have its round and metric
RUN/model-NAME.safetensors                  other final models: ensembles, FedDyn's server model
RUN/checkpoints/round-00000012.json         the manifest of a checkpoint: its files and their checksums
RUN/checkpoints/round-00000012.safetensors  theta, the server's state, the network's state, the best model so far
RUN/checkpoints/clients/7-12.safetensors    the state of client 7 after round 12
RUN/personal/                               the output of `fedadc personalize`; personal-DATA for changed data
RUN/personal/clients.csv                    one line per client and row of the summary
RUN/personal/summary.json                   the settings, and the metrics of every row
RUN/personal/personal.png                   a plot of the gain of every client
RUN/personal/none/client-00012.safetensors  the tuned parameters of client 12, named as in the model's state dict
RUN/fedadc-states-XXXX/                     client states that do not fit in memory, during training
RUN/ray-logs/                               the logs of Ray, where a local cluster trained the clients (--engine ray)
RUN/.replaced-XXXX/                         the old run (--overwrite), kept until the new one is finished
RUN/.lock                                   locked by the process that writes to the run
NAME.part                                   an incomplete file
"""

from __future__ import annotations

import re
from pathlib import Path

from fedadc.system.files import LOCK, PARTIAL
from fedadc.training.state_files import FOLDER_PREFIX as STATES

CONFIG, METRICS, MODEL, ENVIRONMENT = "config.yaml", "metrics.jsonl", "model.safetensors", "environment.json"
BEST_MODEL = "model-best.safetensors"
SEAL, PREPROCESSING = "seal.json", "preprocessing.json"
TRACE, SITES = "trace.jsonl", "sites.json"
REPLACED = ".replaced-"  # a prefix
RAY_LOGS = "ray-logs"

CHECKPOINTS = "checkpoints"
CLIENT_STATES = "clients"  # in CHECKPOINTS
CHECKPOINT_FILE = re.compile(rf"round-(\d{{8,}})(\.json|\.safetensors)({re.escape(PARTIAL)})?")
CLIENT_STATE_FILE = re.compile(rf"\d+-\d+\.safetensors({re.escape(PARTIAL)})?")  # client-round

PERSONAL = "personal"
PERSONAL_TABLE, PERSONAL_SUMMARY, PERSONAL_PLOT = "clients.csv", "summary.json", "personal.png"
PERSONAL_MODELS = ("none", "prox", "confidence", "own")  # folders: the regularizer, or the method's own models
PERSONAL_FILE = re.compile(rf"client-\d{{5,}}\.safetensors({re.escape(PARTIAL)})?")

__all__ = [
    "BEST_MODEL",
    "CHECKPOINTS",
    "CHECKPOINT_FILE",
    "CLIENT_STATES",
    "CLIENT_STATE_FILE",
    "CONFIG",
    "ENVIRONMENT",
    "LOCK",
    "METRICS",
    "MODEL",
    "PARTIAL",
    "PERSONAL",
    "PERSONAL_FILE",
    "PERSONAL_MODELS",
    "PERSONAL_PLOT",
    "PERSONAL_SUMMARY",
    "PERSONAL_TABLE",
    "PREPROCESSING",
    "RAY_LOGS",
    "REPLACED",
    "SEAL",
    "SITES",
    "STATES",
    "TRACE",
    "checkpoint_name",
    "client_state_file",
    "foreign_in_personal",
    "is_checkpoints",
    "is_personal",
    "model_file",
    "other_models",
    "personal_file",
]


def model_file(name: str) -> str:
    """The name of the file for a model other than the main one."""
    return f"model-{name}.safetensors"


def other_models(run: Path) -> dict[str, Path]:
    """The files of a run's models other than the judged one, by the name of the model."""
    files = sorted(run.glob(model_file("*")))
    return {file.stem.removeprefix("model-"): file for file in files}


def checkpoint_name(round: int) -> str:
    """The name of a checkpoint's files, without suffix: .json is the manifest, .safetensors holds the tensors."""
    return f"round-{round:08d}"


def client_state_file(client: int, round: int) -> str:
    return f"{client}-{round}.safetensors"


def personal_file(client: int) -> str:
    return f"client-{client:05d}.safetensors"


def is_checkpoints(folder: Path) -> bool:
    """True if a folder below a run has checkpoints and nothing else."""
    if folder.name != CHECKPOINTS or not folder.is_dir():
        return False
    states = folder / CLIENT_STATES
    own = [file.is_file() and CHECKPOINT_FILE.fullmatch(file.name) for file in folder.iterdir() if file != states]
    own += [CLIENT_STATE_FILE.fullmatch(file.name) for file in states.iterdir()] if states.is_dir() else []
    return all(own)


def is_personal(folder: Path) -> bool:
    """True if a folder in a run directory was written by `fedadc personalize`, completely or partly."""
    if not folder.is_dir() or not re.fullmatch(rf"{PERSONAL}(-.*)?", folder.name.removesuffix(PARTIAL)):
        return False
    return not foreign_in_personal(folder)


def foreign_in_personal(folder: Path) -> list[str]:
    """The names of files in a folder that `fedadc personalize` did not write."""
    files = {
        *(name + end for name in (PERSONAL_TABLE, PERSONAL_SUMMARY, PERSONAL_PLOT) for end in ("", PARTIAL)),
        LOCK,
    }

    def is_ours(path: Path) -> bool:
        if not path.is_dir():
            return path.name in files
        return path.name in PERSONAL_MODELS and all(PERSONAL_FILE.fullmatch(file.name) for file in path.iterdir())

    return sorted(path.name for path in folder.iterdir() if not is_ours(path))
