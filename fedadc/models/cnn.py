"""The paper's CNN (section IV-B): 3×3 convolutions with 2×2 max-pooling, then fully connected layers, no normalization.

The widths are from the authors' later library (docs/deviations.md, 5): 64-128-256-512 and 128-256-512-1024, 2,513,418
parameters with 10 classes. Pooling comes before ReLU, which gives the same result on a quarter of the values. With a
projection head (MOON, section IV-A), average pooling and that head replace the fully connected layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fedadc.errors import require
from fedadc.models.classifier import Classifier, apply_with_relu, projection_head

HIDDEN = (128, 256, 512, 1024)


class CNN(Classifier):
    """Four convolutions and four fully connected layers before the classifier."""

    preferred_init = "kaiming"  # with PyTorch's default, nine plain layers hardly learn (docs/deviations.md, 12)

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        width: float = 1.0,
        channels: Sequence[int] = (64, 128, 256, 512),
        hidden: Sequence[int] | None = None,  # None: 128-256-512-1024, or none with a projection head
        projection: int | None = None,
    ) -> None:
        super().__init__()
        require(len(input_shape) == 3, f"model cnn takes images [channels, height, width], not {list(input_shape)}.")
        require(width > 0, f"model.width must be positive, not {width}.")
        require(bool(channels) and min(channels) > 0, f"model.channels must be positive numbers, not {list(channels)}.")
        require(
            hidden is None or projection is None,
            "model cnn has no hidden layers when it has a projection head; remove model.hidden or model.projection.",
        )
        hidden = HIDDEN if hidden is None else hidden
        require(all(h > 0 for h in hidden), f"model.hidden must be positive widths, not {list(hidden)}.")
        scaled = [max(1, round(width * c)) for c in channels]
        side = [s // 2 ** len(scaled) for s in input_shape[1:]]
        require(
            min(side) > 0,
            f"model cnn halves the image {len(scaled)} times, so it needs at least {2 ** len(scaled)}×"
            f"{2 ** len(scaled)} pixels, not {input_shape[1]}×{input_shape[2]}; give fewer model.channels.",
        )
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, kernel_size=3, padding=1) for a, b in pairwise([input_shape[0], *scaled])
        )
        widths = [scaled[-1] * side[0] * side[1], *(max(1, round(width * h)) for h in hidden)]
        if projection is not None:
            widths = [scaled[-1]]  # average pooling leaves one value per channel
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.projection = None if projection is None else projection_head(widths[-1], projection)
        self.head = nn.Linear(projection or widths[-1], classes)

    def embed(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = F.relu(F.max_pool2d(convolution(x), 2))
        if self.projection is None:
            return apply_with_relu(self.layers, x.flatten(1))
        features: Tensor = self.projection(x.mean(dim=(2, 3)))
        return features
