"""The config that `fedadc init` writes."""

from __future__ import annotations

from pathlib import Path

from fedadc.errors import DiskError, require

STARTER = """\
# Config of a FedADC run. Train: fedadc run THIS_FILE     Change a setting: fedadc run THIS_FILE local.lr=0.05
seed: 0                      # all random numbers derive from it; data.seed and model.seed default to it
rounds: 60
data:
  name: digits               # fedadc list datasets; your own: npz, folder, csv (with path: ...), or module:function
  clients: 50
  partition: {name: sort, labels_per_client: 2}   # fedadc list partitions
  # test: 0.2                # share held out for testing (or a file), if the data set has no test data
  # validation: 0.1          # share held out for choosing settings
  # augment: {crop: 4, flip: true}
model: {name: mlp, hidden: [64, 64]}              # fedadc list models; your own: module:Class
method: {name: fedadc, beta: 0.9, nesterov: true} # fedadc list methods; beta_local defaults to beta, server_lr to 1
objective: {name: cross_entropy}                  # fedadc list objectives; method fedadc+ includes self_confidence
local:
  steps: 8                   # H; or epochs: 2
  batch_size: 16
  lr: 0.1
  # schedule: {name: cosine} # fedadc list schedules
  weight_decay: 0.0
  momentum: 0.0
  # clip: 10.0               # maximum norm of the gradient
cohort: {size: 10}           # clients per round; or ratio: 0.2; also selection: covering (fedadc list selections)
evaluate: {every: 1}         # rounds; also metrics: [top5, macro_f1, per_class]
# stop: {accuracy: 0.95}     # stop early at this accuracy
# faults: {drop: 0.3, slow: 0.2}   # shares of the cohort that never report / that do fewer steps
# ensembles: {ema: {decay: 0.9}}   # also swa, lookahead: averages over rounds, evaluated in addition to the model
# communication: {downlink: overlap, uplink: full}   # fedadc list downlinks, uplinks
# clock: {down: 1.0e+6, up: 1.0e+6, step_seconds: 0.01, latency: 0.05}   # virtual time: docs/communication.md
# checkpoint: {every: 10}    # rounds; default: by time. Resume an interrupted run: fedadc resume RUN
"""


def init(path: str | Path = "fedadc.yaml") -> Path:
    """Write a commented config to start from; an existing file is not replaced."""
    file = Path(path)
    require(not file.exists(), f"{file} already exists; choose another name.")
    try:
        file.write_text(STARTER, encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write {file} ({error.strerror or error}).") from error
    return file
