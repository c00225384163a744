"""Every file name of a run directory, once.

RUN/config.yaml                             the complete config
RUN/metrics.jsonl                           a record per round
RUN/environment.json                        what the result depends on beside the config
RUN/model.safetensors                       the final model by which the run is judged
RUN/model-NAME.safetensors                  its other models: averages, FedDyn's server model
RUN/checkpoints/round-00000012.json         a checkpoint: what belongs to it, with checksums
RUN/checkpoints/round-00000012.safetensors  theta, the server's state, the network's state
RUN/checkpoints/clients/7-12.safetensors    the state of client 7 after round 12
RUN/personal/                               what `fedadc personalize` wrote; personal-DATA for changed data
RUN/personal/clients.csv                    a line per client and row
RUN/personal/summary.json                   the settings, and the figures of every row
RUN/personal/personal.png
RUN/personal/none/client-00012.safetensors  what client 12 tuned, under its names in the model's state dict
RUN/fedadc-states-XXXX/                     client states that do not fit in memory, while a run goes on
RUN/.replaced-XXXX/                         a run that is kept until the one that replaces it is finished
RUN/.lock                                   held by the process that writes
NAME.part                                   a file that is not complete yet
"""

from __future__ import annotations

import re
from pathlib import Path

from fedadc.system.files import LOCK, PARTIAL
from fedadc.training.client_states import FOLDER_PREFIX as STATES

CONFIG, METRICS, MODEL, ENVIRONMENT = "config.yaml", "metrics.jsonl", "model.safetensors", "environment.json"
REPLACED = ".replaced-"  # a prefix

CHECKPOINTS = "checkpoints"
CLIENT_STATES = "clients"  # in CHECKPOINTS
CHECKPOINT_FILE = re.compile(r"round-(\d{8,})(\.json|\.safetensors)(\.part)?")
CLIENT_STATE_FILE = re.compile(r"\d+-\d+\.safetensors(\.part)?")

PERSONAL = "personal"
PERSONAL_TABLE, PERSONAL_SUMMARY, PERSONAL_PLOT = "clients.csv", "summary.json", "personal.png"
PERSONAL_MODELS = ("none", "prox", "confidence", "own")  # folders: the regularizer, or the method's own models
PERSONAL_FILE = re.compile(r"client-\d{5,}\.safetensors(\.part)?")

__all__ = [
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
    "REPLACED",
    "STATES",
    "checkpoint_name",
    "client_state_file",
    "foreign_in_personal",
    "is_personal",
    "model_file",
    "personal_file",
]


def model_file(name: str) -> str:
    """The file of a model other than the judged one."""
    return f"model-{name}.safetensors"


def checkpoint_name(round: int) -> str:
    """Without the ending: .json is the manifest, .safetensors has the tensors."""
    return f"round-{round:08d}"


def client_state_file(client: int, round: int) -> str:
    return f"{client}-{round}.safetensors"


def personal_file(client: int) -> str:
    return f"client-{client:05d}.safetensors"


def is_personal(folder: Path) -> bool:
    """True if `fedadc personalize` wrote this folder below a run, or had begun to."""
    if not folder.is_dir() or not re.fullmatch(rf"{PERSONAL}(-.*)?", folder.name.removesuffix(PARTIAL)):
        return False
    return not foreign_in_personal(folder)


def foreign_in_personal(folder: Path) -> list[str]:
    """What in a folder was not written by `fedadc personalize`."""
    files = {
        *(name + end for name in (PERSONAL_TABLE, PERSONAL_SUMMARY, PERSONAL_PLOT) for end in ("", PARTIAL)),
        LOCK,
    }

    def is_ours(path: Path) -> bool:
        if not path.is_dir():
            return path.name in files
        return path.name in PERSONAL_MODELS and all(PERSONAL_FILE.fullmatch(file.name) for file in path.iterdir())

    return sorted(path.name for path in folder.iterdir() if not is_ours(path))
