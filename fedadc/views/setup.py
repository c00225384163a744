"""A run's settings before training, which `check` of methods and objectives receives."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from fedadc.data.dataset import Array
from fedadc.errors import FedadcError
from fedadc.fields.summary import field_summary
from fedadc.models.flat import FlatModel
from fedadc.views.local_work import LocalWork


@dataclass(frozen=True)
class Setup:
    """The settings of a run that a method or an objective can check."""

    model: FlatModel
    example: Tensor  # a batch of two inputs, as the model receives them
    local: LocalWork
    client_sizes: Array  # the number of training samples of every client
    weighting: str  # how uploads are weighted in the mean: "uniform" or "samples"
    exact_uplink: bool  # True if the server receives every delta bit for bit
    resets_theta: bool  # True if an ensemble resets the global model (lookahead with reset)

    __repr__ = field_summary

    def __getattr__(self, name: str) -> Any:
        """Called for an attribute that a Setup does not have."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise FedadcError(f"check uses setup.{name}, but a Setup has only {', '.join(f.name for f in fields(self))}.")
