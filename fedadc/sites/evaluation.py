"""Evaluation at the sites: each counts on its own test and validation samples, and the server adds up the counts.

So a metric is weighted by samples, and no sample leaves a site. The clients' own models are evaluated where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedadc.data.dataset import Array
from fedadc.errors import FedadcError, require
from fedadc.evaluation.evaluator import Evaluator
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch, MetricCounter
from fedadc.training.state import Metrics, RunState

CONFUSION = "confusion"


@dataclass(frozen=True)
class SiteCounter(MetricCounter):
    """Metrics from the counts of sites, beside the server's own if it has samples.

    A site counts on its whole split, so the batch has its number and no positions of samples.
    """

    held_now: Callable[[], Mapping[str, tuple[int, ...]]] = dict  # split -> clients that have samples of it
    prefix: str = ""  # of the names of these splits

    @property
    def held(self) -> Mapping[str, tuple[int, ...]]:
        """The clients that have samples of a split; there are more of them when sites have joined."""
        return self.held_now()

    def batches(self) -> list[EvaluationBatch]:
        return [*super().batches(), *self.batches_at_sites()]

    def batches_at_sites(self) -> list[EvaluationBatch]:
        return [EvaluationBatch(split, k, k + 1) for split, clients in self.held.items() for k in clients]


@dataclass(frozen=True)
class SiteEvaluator(Evaluator):
    """Evaluates the global models and the clients' own ones at the sites."""

    count_personal: Callable[[RunState], Iterable[BatchCounts]] = lambda _: ()

    def _mean_of_clients(self, state: RunState) -> Metrics:
        """Not at sites: the clients' own models are counted by `of_clients`."""
        return {}

    def of_clients(self, state: RunState) -> Metrics:
        if self.method.federated and not self.method.personalized:
            return {}
        splits = self.counter.metrics(self.count_personal(state))
        named = {f"{split}_personal_{name}": value for split, found in splits.items() for name, value in found.items()}
        return {name.removeprefix("test_"): value for name, value in named.items()}


def to_tensors(counts: Iterable[BatchCounts], by_class: bool) -> dict[str, Tensor]:
    """The counts of every split, added up in order. Labels are told only if a metric needs them."""
    by_split: dict[str, list[BatchCounts]] = {}
    for count in counts:
        by_split.setdefault(count.split, []).append(count)
    found: dict[str, Tensor] = {}
    for split, own in by_split.items():
        found[f"{split}.loss"] = torch.tensor([sum(count.loss for count in own)], dtype=torch.float64)
        found[f"{split}.top5"] = torch.tensor([sum(count.top5 for count in own)])
        table = np.sum([count.confusion for count in own], axis=0)
        found[f"{split}.{CONFUSION}"] = torch.from_numpy(table if by_class else _right_and_wrong(table))
    return found


def _right_and_wrong(table: Array) -> Array:
    """A confusion table with the same accuracy, in which all samples have the first label."""
    right, total = int(np.trace(table)), int(table.sum())
    found = np.zeros_like(table)
    found[0, 0], found[0, -1] = right, total - right
    return found


def from_tensors(content: bytes, sizes: Mapping[str, int], classes: int, site: str) -> dict[str, BatchCounts]:
    """The counts that a site sent, by split; refused if they are not of its samples."""
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise FedadcError(f"site {site} sent counts that cannot be read ({type(error).__name__}).") from None
    held = {split: size for split, size in sizes.items() if split != "train" and size}
    kinds = {"loss": ((1,), torch.float64), "top5": ((1,), torch.int64), CONFUSION: ((classes, classes), torch.int64)}
    wanted = {f"{split}.{name}": kind for split in held for name, kind in kinds.items()}
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    require(found == wanted, f"site {site} sent counts with other names, shapes or types than those of its samples.")
    return {split: _possible(split, size, tensors, site) for split, size in held.items()}


def _possible(split: str, size: int, tensors: Mapping[str, Tensor], site: str) -> BatchCounts:
    """The counts of a split with so many samples; refused if they cannot be."""
    loss, top5, table = (tensors[f"{split}.{name}"] for name in ("loss", "top5", CONFUSION))
    within = int(table.min()) >= 0 and int(table.max()) <= size and int(table.sum()) == size
    require(
        within and 0 <= int(top5) <= size and 0 <= float(loss) < math.inf,
        f"site {site} sent counts of {split} that are not those of its samples.",
    )
    return BatchCounts(split, float(loss), int(top5), table.numpy())
