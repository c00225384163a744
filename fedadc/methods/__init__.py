"""The table of methods, and the famous names that are a method with an objective."""

from __future__ import annotations

from fedadc.methods.base import Method, RoundInfo, State, Vector
from fedadc.methods.fedadc import FedADC
from fedadc.methods.fedadc_double import FedADCDouble
from fedadc.methods.fedavg import FedAvg
from fedadc.methods.slowmo import SlowMo

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "slowmo": SlowMo,
    "fedadc": FedADC,
    "fedadc_double": FedADCDouble,
}
PAIRS: dict[str, tuple[str, str]] = {  # name -> (method, objective)
    "fedadc+": ("fedadc", "self_confidence"),
}

__all__ = ["METHODS", "PAIRS", "FedADC", "FedADCDouble", "FedAvg", "Method", "RoundInfo", "SlowMo", "State", "Vector"]
