"""A client's view of its round: the model, its own data, the received vectors and its own state; no other clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedadc.data.batches import Batch, ClientData
from fedadc.data.dataset import Array
from fedadc.fields.summary import field_summary
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import State, Vector

TEACHER_BATCH = 256  # batch size of a frozen model's pass over a client's data; it affects the bits of results


@dataclass
class Local:
    """Everything that a client can see during its round."""

    model: FlatModel
    data: ClientData
    start: Vector  # theta_t, the received global model
    server: State  # the received server vectors (the downlink), by name
    client: State  # the client's own state
    lr: float  # η_t
    steps: int  # H, the client's own number of steps
    mean_samples: float  # the mean number of samples over all clients; NaN if some site does not tell it
    rng: Callable[[str], np.random.Generator]  # purpose -> a generator for this round and client
    step: int = 0  # τ - 1, the number of the current step
    batch: Batch = field(init=False)  # the batch of the current step
    scratch: dict[str, Vector] = field(default_factory=dict)  # a method's temporary vectors, discarded after the round
    momentum: float = 0.0  # local momentum
    touched: Array | None = None  # sorted positions of the samples that this round uses; None: all
    _rows: dict[str, Tensor] = field(default_factory=dict)  # the cache of `per_sample`

    __repr__ = field_summary

    @cached_property
    def class_counts(self) -> Tensor:
        return self.data.class_counts()

    def per_sample(self, name: str, batch: Batch, make: Callable[[Batch], Tensor]) -> Tensor:
        """The rows that `make` returns for a batch, one per sample, without gradients; e.g. predictions of a teacher.

        Without augmentation, the rows are computed once for all samples that the round uses, in index order, and cached
        under `name`: a frozen teacher then costs one forward pass per round, for any number of epochs.
        """
        with torch.no_grad():
            if self.data.augment:
                return make(batch)
            if name not in self._rows:
                self._rows[name] = torch.cat([make(b) for b in self.data.in_order(self.touched, TEACHER_BATCH)])
        row = batch.position if self.touched is None else np.searchsorted(self.touched, batch.position)
        return self._rows[name].index_select(0, torch.from_numpy(row).to(self.model.device))
