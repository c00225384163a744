"""fluke: its FedAVG, one FastDataLoader per client, no evaluation; runs in the environment `flk`."""

from __future__ import annotations

import sys

import torch

try:
    import torchvision  # noqa: F401 - fluke imports it
except RuntimeError:  # a build for GPUs beside a torch for CPUs lacks its operators; nothing here calls them
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.utils import FederationObserver
from measure import Clock
from workloads import CLASSES, LR, load_tensors, make_model, workload


class Rounds(FederationObserver):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def start_round(self, round: int, global_model: torch.nn.Module) -> None:
        if round == 1:
            self.clock.start()

    def end_round(self, round: int) -> None:
        self.clock.tick()
        if round == self.clock.workload.rounds:
            self.clock.report("fluke-fl")


def main(name: str) -> None:
    torch.set_num_threads(2)
    w = workload(name)
    env = FlukeENV()
    env.set_seed(1)
    env.set_device("cpu")
    env.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    xs, ys = load_tensors(name)
    loaders = [
        FastDataLoader(x, y, num_labels=CLASSES, batch_size=w.batch, shuffle=True) for x, y in zip(xs, ys, strict=True)
    ]
    client = DDict(
        batch_size=w.batch,
        local_epochs=w.epochs,
        loss="CrossEntropyLoss",
        persistency=True,
        optimizer=DDict(name="SGD", lr=LR),
        scheduler=DDict(name="StepLR", step_size=1, gamma=1),
    )
    splitter = DataSplitter(DummyDataContainer(loaders, [None] * w.clients, None, CLASSES))
    settings = DDict(model=make_model(name), client=client, server=DDict(weighted=False))
    algorithm = FedAVG(w.clients, splitter, settings)
    algorithm.set_callbacks([Rounds(Clock(name))])
    algorithm.run(w.rounds, w.cohort / w.clients, finalize=False)


if __name__ == "__main__":
    main(sys.argv[1])
