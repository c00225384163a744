"""A run's settings before training, for `check` of methods and objectives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedadc.data.dataset import Array
from fedadc.models.flat import FlatModel
from fedadc.views.local_work import LocalWork


@dataclass(frozen=True)
class Setup:
    """What a method or an objective may look at to refuse settings that make no sense for it."""

    model: FlatModel
    example: Tensor  # two inputs, as the model receives them
    local: LocalWork
    client_sizes: Array  # training samples of every client
    weighting: str  # of uploads in the mean: "uniform" or "samples"
    exact_uplink: bool  # True if the server receives every delta bit for bit
    resets_theta: bool  # True if an ensemble sets the global model back (lookahead with reset)
