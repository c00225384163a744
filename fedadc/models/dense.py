"""Fully connected networks by hand: linear layers and ReLU, forward and backward in closed form.

On small networks half of a step is autograd's bookkeeping, and a gradient that is added to zeros passes through memory
three times. Here every product is written once, where it belongs (docs/performance.md has the figures).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedadc.models.mlp import MLP, Logistic

Values = list[Tensor]  # the input of every layer, then the logits


@dataclass(frozen=True)
class Layer:
    linear: nn.Linear
    relu: bool  # whether ReLU follows


class Dense:
    """A chain of layers. `forward` keeps what `backward` needs; nothing here has a graph."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers

    def forward(self, x: Tensor) -> Values:
        values = [x.flatten(1)]
        for layer in self.layers:
            z = F.linear(values[-1], layer.linear.weight, layer.linear.bias)
            values.append(z.relu_() if layer.relu else z)
        return values

    def backward(self, values: Values, d: Tensor, gradients: Mapping[Tensor, Tensor]) -> None:
        """Write the gradients of weights and biases, given that of the logits, `d`."""
        for layer, (x, y) in zip(reversed(self.layers), reversed(list(pairwise(values))), strict=True):
            weight, bias = layer.linear.weight, layer.linear.bias
            if layer.relu:
                d = d.masked_fill(y <= 0, 0)
            if weight in gradients:
                torch.mm(d.t(), x, out=gradients[weight])
            if bias is not None and bias in gradients:
                torch.sum(d, dim=0, out=gradients[bias])
            if layer is not self.layers[0]:
                d = d.mm(weight)


def dense_layers(module: nn.Module) -> list[Layer]:
    """The layers of a module that is such a chain and nothing else; of any other, none."""
    steps = list(module) if type(module) is nn.Sequential else []
    if isinstance(module, MLP) and type(module) in (MLP, Logistic):
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
