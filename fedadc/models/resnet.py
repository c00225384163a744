"""ResNet-18 for CIFAR (He et al., 2016) with GroupNorm (Wu and He, 2018) after every convolution (section IV-C).

The CIFAR form has a 3×3 stem without pooling. There are 32 groups, which is how the authors' later library interprets
"group size of 32" (docs/deviations.md, 4); layers with fewer than 32 channels have as many groups as channels. With
`norm` batch it has BatchNorm instead.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedadc.errors import require
from fedadc.models.classifier import Classifier, projection_head


def _norm(channels: int, groups: int) -> nn.Module:
    """GroupNorm, or BatchNorm with 0 groups."""
    if groups == 0:
        return nn.BatchNorm2d(channels)
    groups = min(groups, channels)
    require(
        channels % groups == 0,
        f"model resnet18: {channels} channels do not divide into {groups} groups; choose another model.width.",
    )
    return nn.GroupNorm(groups, channels)


class Block(nn.Module):
    """Two 3×3 convolutions with a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(outputs, groups)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(outputs, groups)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(outputs, groups))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(Classifier):
    """Four stages of two blocks; `width` is the number of channels of the first stage (64 in the paper)."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        width: int = 64,
        groups: int = 32,
        norm: Literal["group", "batch"] = "group",  # batch: for method fedbn
        projection: int | None = None,
    ) -> None:
        super().__init__()
        require(
            len(input_shape) == 3, f"model resnet18 takes images [channels, height, width], not {list(input_shape)}."
        )
        require(
            width > 0 and groups > 0, f"model resnet18: width and groups must be positive, not {width} and {groups}."
        )
        require(norm in ("group", "batch"), f"model.norm must be group or batch, not {norm!r}.")
        groups = groups if norm == "group" else 0
        self.stem = nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False)
        self.norm = _norm(width, groups)
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(4):
            for stride in (1 if stage == 0 else 2, 1):
                outputs = width * 2**stage
                blocks.append(Block(channels, outputs, stride, groups))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.projection = None if projection is None else projection_head(channels, projection)
        self.head = nn.Linear(projection or channels, classes)

    def embed(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x)))).mean(dim=(2, 3))
        features: Tensor = x if self.projection is None else self.projection(x)
        return features
