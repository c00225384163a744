"""fedadc: accelerated federated learning with drift control.

What most programs need is here: `Federation` or `run`, data, results, errors. The rest is in namespaces such as
`fedadc.methods` and `fedadc.objectives`. All names load on first use, so `import fedadc` is quick.
"""

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
    from fedadc import cluster as cluster
    from fedadc import communication as communication
    from fedadc import data as data
    from fedadc import engines as engines
    from fedadc import errors as errors
    from fedadc import evaluation as evaluation
    from fedadc import methods as methods
    from fedadc import models as models
    from fedadc import objectives as objectives
    from fedadc import optimizers as optimizers
    from fedadc import partitions as partitions
    from fedadc import personal as personal
    from fedadc import runs as runs
    from fedadc import schedules as schedules
    from fedadc import selections as selections
    from fedadc import training as training
    from fedadc import views as views
    from fedadc.analysis.comparison import compare as compare
    from fedadc.analysis.label_counts import label_counts as label_counts
    from fedadc.config.catalog import catalog as catalog
    from fedadc.config.settings import Config as Config
    from fedadc.config.starter import init as init
    from fedadc.data import Dataset as Dataset
    from fedadc.data import from_arrays as from_arrays
    from fedadc.data import from_clients as from_clients
    from fedadc.data import from_csv as from_csv
    from fedadc.data import from_frame as from_frame
    from fedadc.data import from_images as from_images
    from fedadc.data import from_npz as from_npz
    from fedadc.data import from_torch as from_torch
    from fedadc.data.loaders.download import download as download
    from fedadc.errors import Diverged as Diverged
    from fedadc.errors import FedadcError as FedadcError
    from fedadc.federation import Federation as Federation
    from fedadc.personal.personalize import personalize as personalize
    from fedadc.runs.evaluate import evaluate as evaluate
    from fedadc.runs.record import load_config as load_config
    from fedadc.runs.runner import resume as resume
    from fedadc.runs.runner import run as run
    from fedadc.studies.demo import demo as demo
    from fedadc.studies.experiment import experiment as experiment
    from fedadc.studies.reproduce import reproduce as reproduce
    from fedadc.studies.sweep import sweep as sweep
    from fedadc.trained.export import export as export
    from fedadc.trained.load import load as load
    from fedadc.trained.predict import predict as predict
    from fedadc.views.local_work import LocalWork as LocalWork

_HOME = {
    "analysis.comparison": ("compare",),
    "studies.demo": ("demo",),
    "studies.experiment": ("experiment",),
    "studies.reproduce": ("reproduce",),
    "studies.sweep": ("sweep",),
    "analysis.label_counts": ("label_counts",),
    "config.catalog": ("catalog",),
    "config.settings": ("Config",),
    "config.starter": ("init",),
    "data": (
        "Dataset",
        "from_arrays",
        "from_clients",
        "from_csv",
        "from_frame",
        "from_images",
        "from_npz",
        "from_torch",
    ),
    "data.loaders.download": ("download",),
    "errors": ("Diverged", "FedadcError"),
    "federation": ("Federation",),
    "personal.personalize": ("personalize",),
    "runs.evaluate": ("evaluate",),
    "runs.record": ("load_config",),
    "runs.runner": ("resume", "run"),
    "trained.export": ("export",),
    "trained.load": ("load",),
    "trained.predict": ("predict",),
    "views.local_work": ("LocalWork",),
}
_NAMESPACES = (
    "cluster", "communication", "data", "engines", "errors", "evaluation", "methods", "models", "objectives",
    "optimizers", "partitions", "personal", "runs", "schedules", "selections", "training", "views",
)  # fmt: skip
_MOVED = {  # names of 0.2 that are now in a namespace; they warn, and are gone in 0.4
    "communication": (
        "Between", "Broadcast", "Clock", "Communication", "Downlink", "EightBit", "Fixed", "Full", "LogNormal",
        "Overlap", "Pull", "TopK", "Uplink",
    ),
    "data": ("Augment", "Batch", "Normalization"),
    "evaluation": ("Evaluation",),
    "methods": (
        "Ditto", "FedADC", "FedADCDouble", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedBABU", "FedDyn", "FedPer",
        "FedProx", "FedRep", "FedYogi", "LocalOnly", "Method", "Scaffold", "SlowMo",
    ),
    "objectives": (
        "CrossEntropy", "GlobalDistillation", "ModelContrast", "NotTrueDistillation", "Objective", "RestrictedSoftmax",
        "SelfConfidence",
    ),
    "partitions": ("IID", "Dirichlet", "Natural", "Partition", "Pooled", "SortAndPartition"),
    "personal": ("PersonalizationResult", "personal_state_dict"),
    "runs": ("Checkpoints", "RunResult"),
    "schedules": ("Cosine", "Exponential", "Step"),
    "selections": ("Clusters", "Covering", "Selection", "Uniform"),
    "training": ("EMA", "SWA", "Ensembles", "Faults", "Lookahead", "Round", "RunState", "Storage"),
    "views": ("Local", "RoundInfo", "Setup"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_NAMESPACE_OF = {name: namespace for namespace, names in _MOVED.items() for name in names}

__all__ = [
    "Config", "Dataset", "Diverged", "FedadcError", "Federation", "LocalWork", "__version__", "catalog", "cluster",
    "communication", "compare", "data", "demo", "download", "engines", "errors", "evaluate", "evaluation",
    "experiment", "export", "from_arrays", "from_clients", "from_csv", "from_frame", "from_images", "from_npz",
    "from_torch", "init",
    "label_counts", "load", "load_config", "methods", "models", "objectives", "optimizers", "partitions",
    "personal", "personalize", "predict", "reproduce", "resume", "run", "runs", "schedules", "selections", "sweep",
    "training", "views",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return importlib.import_module(f"fedadc.{name}")
    if name in _NAMESPACE_OF:
        namespace = _NAMESPACE_OF[name]
        warnings.warn(f"fedadc.{name} is now fedadc.{namespace}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(f"fedadc.{namespace}"), name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fedadc' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fedadc.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
