"""A client's view of its round: the model, its own data, what it received, its own state. Never other clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedadc.data.batches import Batch, ClientData
from fedadc.data.dataset import Array
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import State, Vector

TEACHER_BATCH = 256  # a frozen model's pass over a client's data is cut here; part of the result's bits


@dataclass
class Local:
    """All that a client can see during its round."""

    model: FlatModel
    data: ClientData
    start: Vector  # theta_t, as received
    server: State  # the downlink vectors
    client: State  # its own state
    lr: float  # η_t
    steps: int  # H, its own
    mean_samples: float  # of all clients: a number that the federation knows
    rng: Callable[[str], np.random.Generator]  # purpose -> a generator of this round and client
    step: int = 0  # τ - 1, the present one
    batch: Batch = field(init=False)  # of the present step
    scratch: dict[str, Vector] = field(default_factory=dict)  # a method's own, gone after the round
    touched: Array | None = None  # the positions of this round's samples, sorted; None: all
    _rows: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def class_counts(self) -> Tensor:
        return self.data.class_counts()

    def per_sample(self, name: str, batch: Batch, make: Callable[[Batch], Tensor]) -> Tensor:
        """What `make` gives for a batch, a row per sample, without gradients: a frozen teacher's word, for example.

        Where nothing random changes the inputs it is made once a round for all samples that the round touches, in index
        order, and kept under its name: a teacher costs one forward pass, whatever the number of epochs.
        """
        with torch.no_grad():
            if self.data.augment:
                return make(batch)
            if name not in self._rows:
                self._rows[name] = torch.cat([make(b) for b in self.data.in_order(self.touched, TEACHER_BATCH)])
        row = batch.position if self.touched is None else np.searchsorted(self.touched, batch.position)
        return self._rows[name].index_select(0, torch.from_numpy(row).to(self.model.device))
