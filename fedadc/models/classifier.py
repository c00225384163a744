"""What the built-in models share: features from `embed`, logits from `head`; MOON's projection head."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from fedadc.errors import require


class Classifier(nn.Module):
    """forward(x) = head(embed(x)); subclass it, define `embed` and set `head`."""

    head: nn.Module

    def embed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits


def projection_head(width: int, outputs: int) -> nn.Sequential:
    """Two layers, width -> width -> outputs, that end `embed`, as MOON wants: the classifier sits on them."""
    require(outputs > 0, f"model.projection must be a positive width, not {outputs}.")
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


def through(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Fully connected layers, each with ReLU."""
    for layer in layers:
        x = F.relu(layer(x))
    return x
