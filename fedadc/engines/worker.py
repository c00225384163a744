"""What a worker process does: local updates and counts, one task after another, and nothing else."""

from __future__ import annotations

import pickle
import signal
import sys
import traceback
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from fedadc.data.dataset import Clients, Samples
from fedadc.engines.shared import Layout, SharedBytes, SharedTensors, layout_of
from fedadc.errors import FedadcError
from fedadc.evaluate import Cut, Examiner, Tally
from fedadc.exact import exact
from fedadc.federation.local import Broadcast, Order, Workplace, local_update
from fedadc.methods.base import State


@dataclass(frozen=True)
class TrainingTask:
    """One client. Its state, where it has one, lies in the slot in which its upload and new state are expected."""

    round: int
    lr: float
    client: int
    steps: int
    slot: int
    state: Layout | None


@dataclass(frozen=True)
class MeasuringTask:
    version: int  # of the model that is measured
    cut: Cut


@dataclass(frozen=True)
class Trained:
    """What a report says beside its tensors, and where these lie in the slot."""

    client: int
    upload: Layout
    state: Layout
    loss: float
    samples: int
    steps: int
    loose: tuple[State, State] | None = None  # upload and state where they do not fit in a slot


@dataclass(frozen=True)
class Failed:
    where: str
    message: str | None  # of a FedadcError, meant for the user
    trace: str


@dataclass(frozen=True)
class Desk:
    """What a worker is given once, when it is spawned."""

    folders: list[str]  # where a user's own classes come from
    pickled: bytes  # (Workplace, Examiner) without their data
    data: SharedTensors
    published: SharedTensors  # theta and the downlink vectors of the round; the model that is measured
    slots: SharedBytes
    slot_size: int


@dataclass
class _Work:
    place: Workplace
    examiner: Examiner
    desk: Desk
    views: dict[str, Tensor]
    round: int = -1
    broadcast: Broadcast = field(init=False)
    version: int = -1
    measured: Tensor = field(init=False)

    def train(self, task: TrainingTask) -> Trained:
        device = self.place.model.device
        if task.round != self.round:  # a copy of its own, once a round
            received = {n: v.to(device, copy=True) for n, v in self.views.items() if n != MEASURED}
            self.broadcast = Broadcast(task.round, task.lr, received.pop("theta"), received)
            self.round = task.round
        start = task.slot * self.desk.slot_size
        state = None
        if task.state is not None:
            state = {n: self.desk.slots.view(o, d, s).clone() for n, o, d, s in task.state}
        report = local_update(self.place, self.broadcast, Order(task.client, task.steps, state))
        upload, middle = layout_of(report.upload, start)
        kept, end = layout_of(report.state, middle)
        facts = (report.loss, report.samples, report.steps)
        if end > start + self.desk.slot_size:
            loose = tuple({n: v.cpu() for n, v in s.items()} for s in (report.upload, report.state))
            return Trained(task.client, [], [], *facts, loose)  # type: ignore[arg-type]
        for layout, tensors in ((upload, report.upload), (kept, report.state)):
            for name, offset, dtype, shape in layout:
                self.desk.slots.view(offset, dtype, shape).copy_(tensors[name])
        return Trained(task.client, upload, kept, *facts)

    def measure(self, task: MeasuringTask) -> Tally:
        if task.version != self.version:
            self.measured, self.version = self.views[MEASURED].to(self.place.model.device, copy=True), task.version
        return self.examiner.tally(self.measured, task.cut)


MEASURED = "measured"


def serve(pipe: Connection, desk: Desk) -> None:
    """The whole life of a worker: it ends with its parent, whose end of the pipe is then closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    sys.path[:0] = desk.folders
    place, examiner = pickle.loads(desk.pickled)
    work = _Work(*with_data(place, examiner, desk.data), desk, desk.published.views())
    with exact():
        while True:
            try:
                task: Any = pipe.recv()
            except EOFError:
                return
            if task is None:
                return
            try:
                answer: Any = work.train(task) if isinstance(task, TrainingTask) else work.measure(task)
            except Exception as error:
                message = str(error) if isinstance(error, FedadcError) else None
                answer = Failed(_described(task), message, traceback.format_exc())
            pipe.send(answer)


def with_data(place: Workplace, examiner: Examiner, shared: SharedTensors) -> tuple[Workplace, Examiner]:
    """The same with all data in shared memory."""
    data = shared.views()
    clients = Clients(data["indices"].numpy(), data["offsets"].numpy())
    splits = {name: Samples(data[f"{name}.x"], data[f"{name}.y"]) for name in ("train", *examiner.splits)}
    return replace(place, train=splits.pop("train"), clients=clients), replace(examiner, splits=splits)


def _described(task: Any) -> str:
    if isinstance(task, TrainingTask):
        return f"round {task.round}, client {task.client}"
    return f"the evaluation on {task.cut.split} data"
