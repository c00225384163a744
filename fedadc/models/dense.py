"""Fully connected networks by hand: linear layers and ReLU, forward and backward in closed form.

On small networks half of a step is autograd's bookkeeping, and a gradient that is added to zeros passes through memory
three times. Here every product is written once, where it belongs (docs/performance.md has the figures).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedadc.models.mlp import MLP

threshold_backward = torch.ops.aten.threshold_backward  # ReLU's own derivative, in one pass
Values = list[Tensor]  # the input of every layer, then the logits


@dataclass(frozen=True)
class Layer:
    linear: nn.Linear
    relu: bool  # whether ReLU follows


@dataclass(frozen=True)
class _Slots:
    """A layer's place in the flat vectors. Without a gradient it is frozen."""

    weight: Tensor
    bias: Tensor | None
    weight_gradient: Tensor | None
    bias_gradient: Tensor | None
    relu: bool


class Dense:
    """A chain of layers on views without gradients. `forward` keeps what `backward` needs; neither builds a graph."""

    def __init__(self, layers: list[Layer], gradients: Mapping[Tensor, Tensor]) -> None:
        """`gradients` says where each parameter's gradient belongs."""

        def slots(layer: Layer) -> _Slots:
            weight, bias = layer.linear.weight, layer.linear.bias
            data = None if bias is None else bias.data
            return _Slots(weight.data, data, gradients.get(weight), gradients.get(bias), layer.relu)

        self._slots = [slots(layer) for layer in layers]

    def forward(self, x: Tensor) -> Values:
        values = [x.flatten(1)]
        for layer in self._slots:
            z = F.linear(values[-1], layer.weight, layer.bias)
            values.append(z.relu_() if layer.relu else z)
        return values

    def backward(self, values: Values, d: Tensor) -> None:
        """Write the gradients of weights and biases, given that of the logits, `d`."""
        for number in reversed(range(len(self._slots))):
            layer, x, y = self._slots[number], values[number], values[number + 1]
            if layer.relu:
                d = threshold_backward(d, y, 0)
            if layer.weight_gradient is not None:
                torch.mm(d.t(), x, out=layer.weight_gradient)
            if layer.bias_gradient is not None:
                torch.sum(d, dim=0, out=layer.bias_gradient)
            if number > 0:
                d = d.mm(layer.weight)


def dense_layers(module: nn.Module) -> list[Layer]:
    """The layers of a module that is such a chain and nothing else; of any other, none."""
    kind: Any = type(module)
    steps: list[nn.Module] = []
    if isinstance(module, nn.Sequential) and kind.forward is nn.Sequential.forward:
        steps = list(module)
    elif isinstance(module, MLP) and kind.forward is MLP.forward and kind.embed is MLP.embed:
        steps = module.chain()
    if steps and isinstance(steps[0], nn.Flatten) and (steps[0].start_dim, steps[0].end_dim) == (1, -1):
        steps = steps[1:]
    layers: list[Layer] = []
    for step, following in pairwise([*steps, None]):
        if type(step) is nn.Linear:
            layers.append(Layer(step, relu=type(following) is nn.ReLU))
        elif type(step) is not nn.ReLU or not layers:
            return []
    ours = {id(p) for layer in layers for p in layer.linear.parameters()}
    tied = len({id(layer.linear) for layer in layers}) < len(layers)
    hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in module.modules())
    return [] if tied or hooked or any(id(p) not in ours for p in module.parameters()) else layers
