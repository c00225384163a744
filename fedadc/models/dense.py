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


class Dense:
    """A chain of layers on slices of flat vectors. `forward` keeps what `backward` needs; neither builds a graph."""

    def __init__(self, layers: list[Layer], places: Mapping[Tensor, slice], theta: Tensor, gradient: Tensor) -> None:
        """`places` says where each parameter lies in theta, and its gradient in the other."""
        self._layers, self._places = layers, places
        self._weights, self._gradients = self._cut(theta), self._cut(gradient)

    def _cut(self, vector: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of each layer."""

        def part(p: Tensor) -> Tensor:
            return vector[self._places[p]].view(p.shape)

        linear = [layer.linear for layer in self._layers]
        return [(part(m.weight), None if m.bias is None else part(m.bias)) for m in linear]

    def forward(self, x: Tensor, theta: Tensor | None = None) -> Values:
        """At the theta that it was made with, or at another one."""
        values = [x.flatten(1)]
        weights = self._weights if theta is None else self._cut(theta)
        for layer, (weight, bias) in zip(self._layers, weights, strict=True):
            z = F.linear(values[-1], weight, bias)
            values.append(z.relu_() if layer.relu else z)
        return values

    def backward(self, values: Values, d: Tensor) -> None:
        """Write the gradients of weights and biases, given that of the logits, `d`."""
        for number in reversed(range(len(self._layers))):
            x, y = values[number], values[number + 1]
            of_weight, of_bias = self._gradients[number]
            if self._layers[number].relu:
                d = threshold_backward(d, y, 0)
            torch.mm(d.t(), x, out=of_weight)
            if of_bias is not None:
                torch.sum(d, dim=0, out=of_bias)
            if number > 0:
                d = d.mm(self._weights[number][0])


def dense_layers(module: nn.Module) -> list[Layer]:
    """The layers of a module that is such a chain and nothing else, all of it trained; of any other, none."""
    kind: Any = type(module)
    steps: list[nn.Module] = [module] if kind is nn.Linear else []
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
    ours = [p for layer in layers for p in layer.linear.parameters() if p.requires_grad]
    once = len({id(p) for p in ours}) == len(ours)  # tied weights have gradients from several places
    complete = {id(p) for p in ours} == {id(p) for p in module.parameters()}
    return layers if once and complete and not any(map(_meddled_with, module.modules())) else []


def _meddled_with(module: nn.Module) -> bool:
    """Whether calling a module is more than its class's forward: hooks, a replaced forward, a __call__ of its own."""
    hooks: Any = (
        *(module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks),
        *(p._backward_hooks or () for p in module.parameters(recurse=False)),
    )
    return any(hooks) or "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__
