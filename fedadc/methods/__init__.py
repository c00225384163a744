"""The table of methods by config name, and published names that stand for a method with an objective."""

from __future__ import annotations

from fedadc.methods.base import Method
from fedadc.methods.ditto import Ditto
from fedadc.methods.fedadc import FedADC
from fedadc.methods.fedadc_double import FedADCDouble
from fedadc.methods.fedavg import FedAvg
from fedadc.methods.fedavgm import FedAvgM
from fedadc.methods.fedbabu import FedBABU
from fedadc.methods.fedbn import FedBN
from fedadc.methods.feddyn import FedDyn
from fedadc.methods.fednova import FedNova
from fedadc.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedadc.methods.fedper import FedPer
from fedadc.methods.fedprox import FedProx
from fedadc.methods.fedrep import FedRep
from fedadc.methods.local_only import LocalOnly
from fedadc.methods.scaffold import Scaffold
from fedadc.methods.slowmo import SlowMo
from fedadc.models.vectors import State, Vector
from fedadc.views.round_info import RoundInfo

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "slowmo": SlowMo,
    "fedadc": FedADC,
    "fedadc_double": FedADCDouble,
    "fedprox": FedProx,
    "fednova": FedNova,
    "feddyn": FedDyn,
    "scaffold": Scaffold,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "ditto": Ditto,
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
    "Ditto",
    "FedADC",
    "FedADCDouble",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedDyn",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedYogi",
    "LocalOnly",
    "Method",
    "RoundInfo",
    "Scaffold",
    "SlowMo",
    "State",
    "Vector",
]
