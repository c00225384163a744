"""Apple's pfl-research: FederatedAveraging on its SimulatedBackend, data in memory; runs in the environment `pfl`.

python benchmarks/peer_pfl.py W2: one process of two threads. With torch.distributed.run, two processes of one thread.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
import torch.nn.functional as F

if not hasattr(torch.distributed, "reduce_op"):  # pfl 0.6.0 uses a name that later versions of torch have dropped
    torch.distributed.reduce_op = torch.distributed.ReduceOp

from measure import Clock
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from workloads import LR, load_tensors, make_model, workload


class Rounds(TrainingProcessCallback):
    def __init__(self, clock: Clock, report: bool) -> None:
        self.clock, self.report = clock, report

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.clock.start()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.clock.tick()
        if self.report and central_iteration == self.clock.workload.rounds - 1:
            self.clock.report("pfl")
        return False, Metrics()


def main(name: str) -> None:
    processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.set_num_threads(2 if processes == 1 else 1)
    np.random.seed(1)  # noqa: NPY002 - pfl draws its cohorts from this generator
    w = workload(name)
    xs, ys = load_tensors(name)
    model = make_model(name)
    model.loss = lambda x, y: F.cross_entropy(model(x), y)
    model.metrics = lambda x, y: {"loss": Weighted(model.loss(x, y).item() * len(x), len(x))}
    users = [PyTorchTensorDataset((xs[user], ys[user]), user_id=user) for user in range(w.clients)]
    data = FederatedDataset(users.__getitem__, get_user_sampler("random", list(range(w.clients))))
    clock = Clock(name, root=os.getppid() if processes > 1 else None)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=w.rounds, evaluation_frequency=10**6, train_cohort_size=w.cohort, val_cohort_size=0
        ),
        SimulatedBackend(data, data),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        NNTrainHyperParams(local_batch_size=w.batch, local_num_epochs=w.epochs, local_learning_rate=LR),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Rounds(clock, report=rank == 0)],
    )


if __name__ == "__main__":
    main(sys.argv[1])
