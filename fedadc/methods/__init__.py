"""The table of methods, and the famous names that are a method with an objective."""

from __future__ import annotations

from fedadc.methods.base import Method, RoundInfo, State, Vector
from fedadc.methods.fedadc import FedADC
from fedadc.methods.fedadc_double import FedADCDouble
from fedadc.methods.fedavg import FedAvg
from fedadc.methods.fedavgm import FedAvgM
from fedadc.methods.feddyn import FedDyn
from fedadc.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedadc.methods.fedprox import FedProx
from fedadc.methods.local_only import LocalOnly
from fedadc.methods.scaffold import Scaffold
from fedadc.methods.slowmo import SlowMo

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "slowmo": SlowMo,
    "fedadc": FedADC,
    "fedadc_double": FedADCDouble,
    "fedprox": FedProx,
    "feddyn": FedDyn,
    "scaffold": Scaffold,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "local_only": LocalOnly,
}
PAIRS: dict[str, tuple[str, str]] = {  # name -> (method, objective)
    "fedadc+": ("fedadc", "self_confidence"),
    "moon": ("fedavg", "model_contrast"),
    "fedgkd": ("fedavg", "global_distillation"),
    "fedntd": ("fedavg", "not_true_distillation"),
    "fedrs": ("fedavg", "restricted_softmax"),
}

__all__ = [
    "METHODS",
    "PAIRS",
    "FedADC",
    "FedADCDouble",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDyn",
    "FedProx",
    "FedYogi",
    "LocalOnly",
    "Method",
    "RoundInfo",
    "Scaffold",
    "SlowMo",
    "State",
    "Vector",
]
