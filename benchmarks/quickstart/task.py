"""The model and the local work of the comparison: plain PyTorch."""

from itertools import pairwise

import numpy as np
import torch

FEATURES, HIDDEN, CLASSES, BATCH, LR = 784, (1024, 512), 10, 50, 0.05


def build() -> torch.nn.Module:
    widths = (FEATURES, *HIDDEN)
    layers = [m for a, b in pairwise(widths) for m in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN[-1], CLASSES))


def load(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(path) as file:
        return torch.from_numpy(file["x"]).float(), torch.from_numpy(file["y"].astype(np.int64))


def train(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer, total = torch.optim.SGD(net.parameters(), lr=LR), 0.0
    for batch in torch.randperm(len(x)).split(BATCH):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(x)
