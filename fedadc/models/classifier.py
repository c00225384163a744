"""The base class of the built-in models (features from `embed`, logits from `head`), and MOON's projection head."""

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
    """MOON's projection head, width -> width -> outputs: the last layers of `embed`, before the classifier."""
    require(outputs > 0, f"model.projection must be a positive width, not {outputs}.")
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


def apply_with_relu(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Apply layers one after another, each followed by ReLU."""
    for layer in layers:
        x = F.relu(layer(x))
    return x
