"""fedadc itself: `python benchmarks/ours.py W2 fedadc 2` (workload, method, workers; 0 workers is this process)."""

from __future__ import annotations

import sys

import numpy as np
import torch
from measure import Clock
from workloads import CLASSES, LR, load_tensors, make_model, mlp, workload

import fedadc
from fedadc.data.dataset import Dataset, Samples

METHODS = {
    "fedavg": fedadc.methods.FedAvg(),
    "fedadc": fedadc.methods.FedADC(),
    "fedadc+": fedadc.methods.FedADC(objective=fedadc.objectives.SelfConfidence()),
}
FEATURES, EACH = 16, 10  # of the small clients that there are a million of


def dataset(x: torch.Tensor, y: torch.Tensor) -> Dataset:
    """From x [clients, samples, ...] and y [clients, samples]: every client keeps what it has."""
    owners = np.repeat(np.arange(len(y)), y.shape[1])
    return Dataset("bench", Samples(x.flatten(0, 1), y.flatten()), tuple(map(str, range(CLASSES))), owners=owners)


def small_clients(clients: int) -> Dataset:
    """So many clients of 10 samples of 16 features."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(clients, EACH, FEATURES, generator=rng)
    return dataset(x, torch.randint(0, CLASSES, (clients, EACH), generator=rng))


def small_federation(data: Dataset, workers: int) -> fedadc.Federation:
    """FedADC on such clients, 100 a round, two steps each."""
    torch.manual_seed(0)
    work = fedadc.LocalWork(epochs=1, batch_size=5, lr=LR)
    model = mlp(FEATURES, 32, CLASSES)
    return fedadc.Federation(
        test=0, model=model, data=data, method=METHODS["fedadc"], cohort=100, local=work, workers=workers
    )


def federation(
    name: str, method: str, workers: int, data: Dataset | None = None, epochs: int | None = None
) -> fedadc.Federation:
    """A workload's federation, on its own data unless some is given."""
    w = workload(name)
    work = fedadc.LocalWork(epochs=epochs or w.epochs, batch_size=w.batch, lr=LR)
    data = data or dataset(*load_tensors(name))
    return fedadc.Federation(
        test=0, model=make_model(name), data=data, method=METHODS[method], cohort=w.cohort, local=work, workers=workers
    )


def main(name: str, method: str, workers: int) -> None:
    clock = Clock(name)
    trained = federation(name, method, workers)
    clock.start()
    for _ in trained.rounds(workload(name).rounds):
        clock.tick()
    clock.report("fedadc")
    trained.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
