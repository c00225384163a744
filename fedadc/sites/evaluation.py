"""Evaluation at the sites: each counts on its own test and validation samples, and the server adds up the counts.

So a metric is weighted by samples, and no sample leaves a site. The clients' own models are evaluated where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedadc.errors import FedadcError, require
from fedadc.evaluation.evaluator import Evaluator
from fedadc.evaluation.metrics import BatchCounts, EvaluationBatch, MetricCounter
from fedadc.tasks import Sums, Task, added
from fedadc.training.state import Metrics, RunState


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


def to_tensors(counts: Iterable[BatchCounts], task: Task, by_class: bool) -> dict[str, Tensor]:
    """The sums of every split, added up in order. Labels are told only if a metric needs them."""
    by_split: dict[str, list[Sums]] = {}
    for count in counts:
        by_split.setdefault(count.split, []).append(count.sums)
    found: dict[str, Tensor] = {}
    for split, own in by_split.items():
        total = added(own)
        for name, values in (total if by_class else task.without_labels(total)).items():
            found[f"{split}.{name}"] = torch.from_numpy(values)
    return found


def from_tensors(content: bytes, sizes: Mapping[str, int], task: Task, site: str) -> dict[str, BatchCounts]:
    """The sums that a site sent, by split; refused if they are not of its samples."""
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise FedadcError(f"site {site} sent counts that cannot be read ({type(error).__name__}).") from None
    held = {split: size for split, size in sizes.items() if split != "train" and size}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if tensor.dtype in (torch.float64, torch.int64)}
    wanted = {f"{split}.{name}": kind for split in held for name, kind in task.shapes().items()}
    found = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    require(
        found == wanted and len(arrays) == len(tensors),
        f"site {site} sent counts with other names, shapes or types than those of its samples.",
    )
    counts = {}
    for split, size in held.items():
        sums = {name: arrays[f"{split}.{name}"] for name in task.shapes()}
        require(task.possible(sums, size), f"site {site} sent counts of {split} that are not those of its samples.")
        counts[split] = BatchCounts(split, sums)
    return counts
