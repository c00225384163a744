"""FedBN: four clinics whose cameras differ train one network, and each keeps its own BatchNorm layers.

    python examples/batch_norm.py        (some seconds)

Every clinic has the same ten digits, but its pictures are brighter or darker, with more or less contrast. With FedBN
each clinic's BatchNorm learns its own camera; everything else is learned together.
"""

import numpy as np
import torch
from torch import nn

import fedadc
from fedadc.data import digits
from fedadc.methods import FedAvg, FedBN

CAMERAS = [(1.0, 0.0), (0.3, 0.5), (3.0, -2.0), (-1.0, 1.0)]  # contrast, brightness; the last one takes negatives


def clinics() -> fedadc.data.Dataset:
    """The digits in four parts, each seen by another camera; each client holds out a fifth of its own for testing."""
    pictures = digits().train
    x, y = pictures.x.float().flatten(1) / 16, pictures.y
    parts = np.array_split(np.random.default_rng(0).permutation(len(y)), len(CAMERAS))
    return fedadc.from_clients([(a * x[own] + b, y[own]) for (a, b), own in zip(CAMERAS, parts, strict=True)])


def network(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), norm, nn.ReLU(), nn.Linear(32, 10))


work = fedadc.LocalWork(epochs=1, batch_size=32, lr=0.1)
for name, method, norm in (
    ("FedBN, BatchNorm", FedBN(), nn.BatchNorm1d(32)),
    ("FedAvg, LayerNorm", FedAvg(), nn.LayerNorm(32)),
):
    federation = fedadc.Federation(model=network(norm), data=clinics(), method=method, local=work, seed=1)
    result = list(federation.rounds(15))[-1]
    metrics = federation.evaluate(result.state)
    print(f"{name}: {metrics.get('personal_accuracy', metrics.get('test_accuracy')):.3f}")
