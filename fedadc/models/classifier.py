"""What the built-in models share: features from `embed`, logits from `head`."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """forward(x) = head(embed(x)); subclass it, define `embed` and set `head`."""

    head: nn.Module

    def embed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits


def through(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Fully connected layers, each with ReLU."""
    for layer in layers:
        x = F.relu(layer(x))
    return x
