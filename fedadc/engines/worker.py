"""What a worker process does: local updates and counts, one task after another, and nothing else."""

from __future__ import annotations

import ctypes
import gc
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedadc.data.dataset import Clients, Samples
from fedadc.engines.shared import Parcel, SharedTensors, Slots
from fedadc.errors import FedadcError, one_line
from fedadc.evaluate import Cut, Examiner, Tally
from fedadc.exact import exact
from fedadc.federation.aggregate import added, weighted
from fedadc.federation.local import Broadcast, Order, Workplace, local_update
from fedadc.methods.base import State


class TrainingTask(NamedTuple):
    """One client, or a whole block of clients without states, whose uploads are added up where they arise."""

    version: int  # of the broadcast, which lies in shared memory
    round: int
    lr: float
    orders: tuple[tuple[int, int, float], ...]  # client, steps, weight
    slot: int  # where the sum is expected, and the clients' new states
    state: Parcel | None  # of a single client

    @property
    def is_large(self) -> bool:
        return isinstance(self.state, bytes)


class MeasuringTask(NamedTuple):
    version: int  # of the model that is measured
    cut: Cut


class Trained(NamedTuple):
    """What the clients of a task report."""

    slot: int
    sum: Parcel
    states: list[Parcel]  # of each client
    facts: list[tuple[Any, ...]]  # client, loss, bytes, steps, weight, whether finite, of each


@dataclass(frozen=True)
class Failed:
    where: str
    message: str | None  # of a FedadcError, meant for the user
    trace: str


@dataclass
class Desk:
    """What a worker is given once, when it is spawned."""

    folders: list[str]  # where a user's own classes come from
    pickled: bytes  # (Workplace, Examiner) without their data
    data: SharedTensors
    published: SharedTensors  # theta and the downlink vectors of the round; the model that is measured
    slots: Slots


@dataclass
class _Work:
    place: Workplace
    examiner: Examiner
    desk: Desk
    views: dict[str, Tensor]  # of what is published
    doing: str = ""  # for the message if it fails
    received: int = -1  # version of the broadcast
    broadcast: Broadcast = field(init=False)
    version: int = -1
    measured: Tensor = field(init=False)

    def train(self, task: TrainingTask) -> Trained:
        if task.version != self.received:  # a copy of its own, once a round
            vectors = {n: self._here(v) for n, v in self.views.items() if n != MEASURED}
            self.broadcast = Broadcast(task.round, task.lr, vectors.pop("theta"), vectors)
            self.received = task.version
        own = {}
        if task.state is not None:
            own[task.orders[0][0]] = {name: v.clone() for name, v in self.desk.slots.get(task.state).items()}
        total: State = {}
        states, facts = [], []
        for client, steps, weight in task.orders:
            self.doing = f"round {task.round}, client {client}"
            report = local_update(self.place, self.broadcast, Order(client, steps, own, weight))
            if report.finite:
                upload = weighted(report.upload, weight, self.place.method.tracked)
                total = upload if len(task.orders) == 1 else added(total, upload)
            states.append(report.state if report.finite else {})
            facts.append((client, report.loss, report.sent, report.steps, report.weight, report.finite))
        where, *kept = self.desk.slots.put(task.slot, total, *states)
        return Trained(task.slot, where, kept, facts)

    def measure(self, task: MeasuringTask) -> Tally:
        self.doing = f"the evaluation on {task.cut.split} data"
        if task.version != self.version:
            self.measured, self.version = self._here(self.views[MEASURED]), task.version
        return self.examiner.tally(self.measured, task.cut)

    def _here(self, vector: Tensor) -> Tensor:
        return vector.to(self.place.model.device, copy=True)


MEASURED = "measured"
READY = "ready"  # the first word of a worker
IDLE = 0.01  # seconds


def serve(pipe: Connection, desk: Desk, device: torch.device) -> None:
    """The whole life of a worker: it ends with its parent, whose end of the pipe is then closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    gc.freeze()  # a collection would touch, and so copy, all that was forked
    try:
        work = _sit_down(desk, device)
    except Exception as error:
        sentence = (
            f"a worker process cannot take over the model, the method or the objective ({one_line(error)}): "
            "define them in a file, or at the top level of a script that is one; workers=0 does without."
        )
        pipe.send(Failed("the start of a worker", sentence, traceback.format_exc()))
        return
    with exact():
        with suppress(OSError):
            pipe.send(READY)
        while True:
            if not pipe.poll(IDLE):
                _give_memory_back()
            try:
                task: Any = pipe.recv()
            except (EOFError, OSError):  # the parent is gone
                return
            try:
                answer: Any = work.train(task) if isinstance(task, TrainingTask) else work.measure(task)
            except Exception as error:
                message = str(error) if isinstance(error, FedadcError) else None
                answer = Failed(work.doing, message, traceback.format_exc())
            with suppress(OSError):
                pipe.send(answer)


def _give_memory_back() -> None:
    """Of an idle worker, which otherwise keeps it (`processes.KEEP_MEMORY`); where the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _sit_down(desk: Desk, device: torch.device) -> _Work:
    sys.path[:0] = desk.folders
    place, examiner = pickle.loads(desk.pickled)
    desk.pickled = b""  # it may be large
    place, examiner = with_data(place, examiner, desk.data)
    model, inputs = place.model.on(device), replace(place.inputs, device=device)
    place, examiner = replace(place, model=model, inputs=inputs), replace(examiner, model=model, inputs=inputs)
    return _Work(place, examiner, desk, desk.published.views())


def with_data(place: Workplace, examiner: Examiner, shared: SharedTensors) -> tuple[Workplace, Examiner]:
    """The same with all data in shared memory."""
    data = shared.views()
    clients = Clients(data["indices"].numpy(), data["offsets"].numpy())
    splits = {name: Samples(data[f"{name}.x"], data[f"{name}.y"]) for name in ("train", *examiner.splits)}
    return replace(place, train=splits.pop("train"), clients=clients), replace(examiner, splits=splits)
