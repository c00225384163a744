"""Fully connected networks without autograd: linear layers and ReLU, forward and backward in closed form.

On small networks, autograd's bookkeeping takes half of a step, and accumulating a gradient into zeros reads or writes
it three times. Here every gradient is written once, directly to its place in the flat vector (figures:
docs/performance.md).
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
    relu: bool  # True if ReLU follows


class Dense:
    """A chain of layers on slices of flat vectors. `forward` returns what `backward` needs; neither builds a graph."""

    def __init__(self, layers: list[Layer], slices: Mapping[Tensor, slice], theta: Tensor, gradient: Tensor) -> None:
        """`slices` has the slice of theta of each parameter; its gradient has the same slice of `gradient`."""
        self._layers, self._slices = layers, slices
        self._weights, self._gradients = self._views(theta), self._views(gradient)

    def _views(self, vector: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Views of a flat vector: weight and bias of each layer."""

        def view(p: Tensor) -> Tensor:
            return vector[self._slices[p]].view(p.shape)

        linear = [layer.linear for layer in self._layers]
        return [(view(m.weight), None if m.bias is None else view(m.bias)) for m in linear]

    def forward(self, x: Tensor, theta: Tensor | None = None) -> Values:
        """Run the network at the theta of the constructor, or at the one given."""
        values = [x.flatten(1)]
        weights = self._weights if theta is None else self._views(theta)
        for layer, (weight, bias) in zip(self._layers, weights, strict=True):
            z = F.linear(values[-1], weight, bias)
            values.append(z.relu_() if layer.relu else z)
        return values

    def backward(self, values: Values, d: Tensor) -> None:
        """Write the gradients of weights and biases; `d` is the gradient of the logits."""
        for number in reversed(range(len(self._layers))):
            x, y = values[number], values[number + 1]
            weight_gradient, bias_gradient = self._gradients[number]
            if self._layers[number].relu:
                d = threshold_backward(d, y, 0)
            torch.mm(d.t(), x, out=weight_gradient)
            if bias_gradient is not None:
                torch.sum(d, dim=0, out=bias_gradient)
            if number > 0:
                d = d.mm(self._weights[number][0])


def dense_layers(module: nn.Module) -> list[Layer]:
    """The layers of a module that is only a chain of trainable linear layers and ReLU; else an empty list."""
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
    trained = [p for layer in layers for p in layer.linear.parameters() if p.requires_grad]
    untied = len({id(p) for p in trained}) == len(trained)  # tied weights get gradients from several layers
    complete = {id(p) for p in trained} == {id(p) for p in module.parameters()}
    return layers if untied and complete and not any(map(_has_custom_call, module.modules())) else []


def _has_custom_call(module: nn.Module) -> bool:
    """True if calling a module is more than its class's forward: hooks, a replaced forward, its own __call__."""
    hooks: Any = (
        *(module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks),
        *(p._backward_hooks or () for p in module.parameters(recurse=False)),
    )
    return any(hooks) or "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__
