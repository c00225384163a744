"""Multilayer perceptron and logistic regression, on flattened inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fedadc.errors import require
from fedadc.models.classifier import Classifier, apply_with_relu, projection_head


class MLP(Classifier):
    """Fully connected layers with ReLU between them."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        hidden: Sequence[int] = (64, 64),
        projection: int | None = None,
    ) -> None:
        super().__init__()
        require(all(h > 0 for h in hidden), f"model.hidden must be positive widths, not {list(hidden)}.")
        widths = [math.prod(input_shape), *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.projection = None if projection is None else projection_head(widths[-1], projection)
        self.head = nn.Linear(projection or widths[-1], classes)

    def chain(self) -> list[nn.Module]:
        """The modules that `forward` applies, in order."""
        hidden = [step for layer in self.layers for step in (layer, nn.ReLU())]
        return [nn.Flatten(), *hidden, *(self.projection or ()), self.head]

    def embed(self, x: Tensor) -> Tensor:
        x = apply_with_relu(self.layers, x.flatten(1))
        features: Tensor = x if self.projection is None else self.projection(x)
        return features


class Logistic(MLP):
    """Multinomial logistic regression: a classifier on the raw inputs."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes, hidden=())
