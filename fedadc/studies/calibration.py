"""What the parts of a run cost on this machine: a visit to a client, a step, a sample, an evaluation, an update.

They are measured on real steps of the real method, objective and model, with the seconds of this process alone, so
that other programs hardly disturb. No step is longer than in the run; of large models only a few are trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedadc.config.build import build_agreement
from fedadc.config.settings import Config
from fedadc.data.dataset import Dataset
from fedadc.errors import Diverged
from fedadc.evaluation.metrics import EvaluationBatch, MetricCounter
from fedadc.models.vectors import State
from fedadc.studies.flops import flops_of
from fedadc.studies.workload import Message
from fedadc.system.determinism import deterministic
from fedadc.system.memory import forget_peak, give_memory_back, peak_memory
from fedadc.training.aggregate import OrderedMean, PartialSum, received
from fedadc.training.local import local_update
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.views.round_info import RoundInfo

ENOUGH = 0.15  # seconds over which a short part is repeated
LONG = 1.0  # seconds; a part that takes longer is not repeated
FEW = 4  # samples on which FLOPs are counted, and FLOPs per sample do not depend on their number
SMALL_BATCH = 16  # samples of the first evaluation
STEPS = (2, 6)  # the lengths of two visits, from which the time of a step follows
LR = 1e-3  # it changes no cost, and a config's own may diverge on random samples


@dataclass(frozen=True)
class Flops:
    """FLOPs of clients: of each visit, of each sample of a step, and of each sample that a frozen teacher sees."""

    visit: float
    sample: float
    touched: float

    def of(self, visits: int, samples: int, touched: int) -> float:
        return visits * self.visit + samples * self.sample + touched * self.touched


@dataclass(frozen=True)
class Costs:
    """The costs of the parts of a run: seconds, FLOPs, bytes."""

    visit: float  # seconds of a client's visit beside its steps
    step: float  # seconds of a step beside its samples
    sample: float  # seconds of a sample of a step
    teacher: float  # seconds of a FLOP of a frozen teacher
    update: float  # seconds of the server's update
    counted_batch: float  # seconds of a batch of an evaluation beside its samples
    counted_sample: float
    first: Flops  # of clients without a state
    later: Flops
    counted_flops: float  # of a sample of an evaluation
    message: Message
    state: int  # bytes that a client keeps
    memory: int  # bytes at the peak, before clients have states


@dataclass
class Bench:
    """A place to train and to evaluate parts of a run."""

    config: Config  # complete
    data: Dataset

    def __post_init__(self) -> None:
        self.agreement = build_agreement(self.config, self.data.spec, self.data.train)
        start, server = self.agreement.start, self.agreement.server
        self.server_state = server.start(start)
        vectors = {name: self.server_state[name] for name in server.downlink(start)}
        self.broadcast = ServerBroadcast(1, LR, start, vectors, mean_samples=float(len(self.data.train)))
        self.state: State | None = None  # of the client, after its first visit
        splits = {name: samples for name, samples in self.data.splits().items() if name != "train"}
        task, inputs = self.agreement.task, self.agreement.inputs
        self.counter = MetricCounter(self.agreement.model, splits, inputs, task, self.config.evaluate)

    def visit(self, samples: int, batch_size: int, steps: int) -> PartialSum:
        """Train a client that has these samples, and add its upload to a sum."""
        work = replace(self.agreement.work, batch_size=batch_size, steps=steps, epochs=None)
        agreement = replace(self.agreement, work=work)
        own = agreement.client_data(self.data.train, np.resize(np.arange(len(self.data.train)), samples))
        part = received(agreement, local_update(agreement, own, self.state, self.broadcast, ClientTask(0, steps)), 1.0)
        OrderedMean().add(part)
        return part

    def remember(self, part: PartialSum) -> None:
        """Let the client go on from its first visit."""
        self.state = part.reports[0].state or None

    def update(self, mean: State) -> None:
        """Update the server, and the averages that it keeps."""
        with suppress(Diverged):  # a wild setting; it takes as long
            info = RoundInfo(round=1, lr=LR, counted=1, clients=1)
            self.agreement.server.updated(self.agreement.start, self.server_state, mean, info)

    def count(self, samples: int) -> None:
        """Evaluate the model on some samples of the largest split."""
        largest = max(self.counter.splits, key=lambda name: len(self.counter.splits[name]))
        self.counter.count(self.agreement.start, EvaluationBatch(largest, 0, samples))

    @property
    def evaluation_batch(self) -> int:
        """The samples of a full batch of an evaluation; 0 if nothing is evaluated."""
        size = self.config.evaluate.batch_size
        return min(size, max((len(samples) for samples in self.counter.splits.values()), default=0))


def calibrate(config: Config, data: Dataset) -> tuple[Bench, Costs]:
    """Measure what a run costs, part by part; `config` is complete."""
    bench = Bench(config, data)
    with deterministic():
        part, first, later, counted_flops = _count_flops(bench)
        counted_batch, counted_sample, evaluating = _evaluation(bench)
        teacher = counted_sample / counted_flops if counted_flops else 0.0  # it is like an evaluation
        visit, step, sample = _training(bench, later.touched * teacher)
        mean = {name: vector.clone() for name, vector in part.sum.items()}
        update = seconds_of(partial(bench.update, mean))
    state = sum(v.numel() * v.element_size() for v in (bench.state or {}).values())
    costs = Costs(
        visit, step, sample, teacher, update, counted_batch, counted_sample, first, later, counted_flops,
        Message.like(part.reports[0].sent, mean), state, memory=max(peak_memory(), evaluating),
    )  # fmt: skip
    return bench, costs


def _count_flops(bench: Bench) -> tuple[PartialSum, Flops, Flops, float]:
    """FLOPs of a client's first and of its later visits, and of an evaluation per sample; and what it uploads."""
    few = min(FEW, bench.agreement.work.batch_size)
    first = _flops_of_visits(bench, few)
    part = bench.visit(few, few, 1)
    bench.remember(part)
    later = _flops_of_visits(bench, few) if bench.state else first
    counted = min(few, bench.evaluation_batch)
    return part, first, later, flops_of(partial(bench.count, counted)) / counted if counted else 0.0


def _flops_of_visits(bench: Bench, few: int) -> Flops:
    """From visits of (samples, steps): the second repeats its batch, and the third has two different batches."""
    visits = ((few, 1), (few, 2), (2 * few, 2))
    one, repeated, two = (flops_of(partial(bench.visit, samples, few, steps)) for samples, steps in visits)
    sample, touched = (repeated - one) / few, (two - repeated) / few
    return Flops(one - few * (sample + touched), sample, touched)


def _training(bench: Bench, teacher: float) -> tuple[float, float, float]:
    """Seconds of a visit, a step and a sample; `teacher` are those of a sample that a frozen teacher sees."""
    size = min(bench.agreement.work.batch_size, len(bench.data.train))
    one = seconds_of(partial(bench.visit, size, size, 1))
    few, many = STEPS if one * STEPS[1] < LONG else (1, 1 if one > LONG else 2)
    short = one if few == 1 else seconds_of(partial(bench.visit, size, size, few))
    step = max(0.0, short - size * teacher)
    if many > few:
        step = max(0.0, seconds_of(partial(bench.visit, size, size, many)) - short) / (many - few)
    visit = max(0.0, short - few * step - size * teacher)
    part = max(1, size // 4)
    if part == size:
        return visit, step, 0.0
    smaller = (seconds_of(partial(bench.visit, part, part, many)) - visit - part * teacher) / many
    sample = min(max(0.0, step - smaller) / (size - part), step / size)
    return visit, step - size * sample, sample


def _evaluation(bench: Bench) -> tuple[float, float, int]:
    """Seconds of a batch and of a sample of an evaluation, and the peak of memory with a full batch."""
    full, so_far = bench.evaluation_batch, peak_memory()
    small = min(full, SMALL_BATCH)
    if not full:
        return 0.0, 0.0, so_far
    short = seconds_of(partial(bench.count, small))
    if small == full:
        return 0.0, short / full, so_far
    if short * full / small > 1.5 * LONG:
        larger = min(full, 3 * small)
        low, high = peak_of(partial(bench.count, small)), peak_of(partial(bench.count, larger))
        return 0.0, short / small, max(so_far, high + (high - low) * (full - larger) // (larger - small))
    long = seconds_of(partial(bench.count, full))
    sample = min(max(0.0, long - short) / (full - small), long / full)
    return long - full * sample, sample, so_far


def seconds_of(call: Callable[[], Any]) -> float:
    """The mean time of a call, after a first call that may prepare something; of a long call, the first."""
    began = time.process_time()
    call()
    first = time.process_time() - began
    if first > LONG:
        return first
    began, times = time.process_time(), 0
    while True:
        call()
        times += 1
        took = time.process_time() - began
        if took >= ENOUGH:
            return took / times


def peak_of(call: Callable[[], Any]) -> int:
    """The peak of memory during a call, where the system can tell it; else the peak so far."""
    give_memory_back()  # or the call would find room in what is free, and its peak would not show
    forget_peak()
    call()
    return peak_memory()
