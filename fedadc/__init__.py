"""fedadc: accelerated federated learning with drift control. The public names load on first use."""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedadc.system.version import __version__


def _widest_vectors() -> str:
    """The MKL kernels to use; by default, MKL chooses them by the alignment of its inputs, which changes bits."""
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "AVX2"
    flags = set(cpu.partition("\nflags")[2].partition("\n")[0].split())
    wide = "GenuineIntel" in cpu and {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags
    return "AVX512" if wide else "AVX2"


os.environ.setdefault("MKL_CBWR", _widest_vectors())  # read when torch loads
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic; read at the first product on a GPU

if TYPE_CHECKING:
    from fedadc.communication.clock import Between, Clock, Fixed, LogNormal
    from fedadc.communication.downlinks import Broadcast, Downlink, Overlap, Pull
    from fedadc.communication.network import Communication
    from fedadc.communication.uplinks import EightBit, Full, TopK, Uplink
    from fedadc.config.settings import Config
    from fedadc.data import (
        Dataset,
        HeldOut,
        Normalization,
        from_arrays,
        from_clients,
        from_csv,
        from_images,
        from_npz,
        from_torch,
    )
    from fedadc.data.batches import Augment, Batch
    from fedadc.errors import FedadcError
    from fedadc.evaluation.metrics import Evaluation
    from fedadc.federation import Federation
    from fedadc.methods import (
        Ditto,
        FedAdagrad,
        FedAdam,
        FedADC,
        FedADCDouble,
        FedAvg,
        FedAvgM,
        FedBABU,
        FedDyn,
        FedPer,
        FedProx,
        FedRep,
        FedYogi,
        LocalOnly,
        Method,
        Scaffold,
        SlowMo,
    )
    from fedadc.objectives import (
        CrossEntropy,
        GlobalDistillation,
        ModelContrast,
        NotTrueDistillation,
        Objective,
        RestrictedSoftmax,
        SelfConfidence,
    )
    from fedadc.partitions import IID, Dirichlet, Natural, Partition, Pooled, SortAndPartition
    from fedadc.personal.folder import personal_state_dict
    from fedadc.personal.personalize import PersonalizationResult, personalize
    from fedadc.runs.checkpoint import Checkpoints
    from fedadc.runs.record import load_config
    from fedadc.runs.runner import RunResult, resume, run
    from fedadc.schedules import Cosine, Exponential, Step
    from fedadc.selections import Clusters, Covering, Selection, Uniform
    from fedadc.training.client_states import Storage
    from fedadc.training.ensembles import EMA, SWA, Ensembles, Lookahead
    from fedadc.training.faults import Faults
    from fedadc.training.state import Round, RunState
    from fedadc.views.local import Local
    from fedadc.views.local_work import LocalWork
    from fedadc.views.round_info import RoundInfo
    from fedadc.views.setup import Setup

# fmt: off
_HOME = {
    "runs.checkpoint": ("Checkpoints",),
    "config.settings": ("Config",),
    "data": (
        "Dataset", "HeldOut", "Normalization", "from_arrays", "from_clients", "from_csv", "from_images", "from_npz",
        "from_torch",
    ),
    "data.batches": ("Augment", "Batch"),
    "partitions": ("IID", "Dirichlet", "Natural", "Partition", "Pooled", "SortAndPartition"),
    "errors": ("FedadcError",),
    "evaluation.metrics": ("Evaluation",),
    "communication.clock": ("Clock", "Fixed", "LogNormal", "Between"),
    "communication.network": ("Communication",),
    "communication.downlinks": ("Broadcast", "Downlink", "Overlap", "Pull"),
    "training.ensembles": ("EMA", "SWA", "Ensembles", "Lookahead"),
    "training.faults": ("Faults",),
    "federation": ("Federation",),
    "views.local": ("Local",),
    "views.local_work": ("LocalWork",),
    "views.round_info": ("RoundInfo",),
    "views.setup": ("Setup",),
    "training.state": ("Round", "RunState"),
    "schedules": ("Cosine", "Exponential", "Step"),
    "selections": ("Clusters", "Covering", "Selection", "Uniform"),
    "training.client_states": ("Storage",),
    "communication.uplinks": ("EightBit", "Full", "TopK", "Uplink"),
    "methods": (
        "Ditto", "FedADC", "FedADCDouble", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedBABU", "FedDyn", "FedPer",
        "FedProx", "FedRep", "FedYogi", "LocalOnly", "Method", "Scaffold", "SlowMo",
    ),
    "objectives": (
        "CrossEntropy", "GlobalDistillation", "ModelContrast", "NotTrueDistillation", "Objective", "RestrictedSoftmax",
        "SelfConfidence",
    ),
    "personal.folder": ("personal_state_dict",),
    "personal.personalize": ("PersonalizationResult", "personalize"),
    "runs.record": ("load_config",),
    "runs.runner": ("RunResult", "resume", "run"),
}
# fmt: on
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted([*_MODULE_OF, "__version__"])


_RENAMED = {"Normalisation": "Normalization", "Personalisation": "PersonalizationResult"}  # of 0.1; gone in 0.3


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"fedadc.{name} is now fedadc.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedadc' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fedadc.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
