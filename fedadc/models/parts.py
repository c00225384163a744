"""The layers of a module that federated training treats apart: its head and its BatchNorm layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedadc.errors import FedadcError, require, unknown


def layer_named(module: nn.Module, name: str) -> nn.Module:
    """The layer of a module at a dotted path, e.g. fc or classifier.6."""
    layers: dict[str, nn.Module] = {path: layer for path, layer in module.named_modules() if path}
    if name not in layers:
        raise unknown("head: layer", name, layers)
    return layers[name]


def input_of(layer: nn.Module, run: Callable[[], Any]) -> Tensor:
    """What a layer receives while a module runs."""
    received: list[Any] = []
    hook = layer.register_forward_pre_hook(lambda _, arguments: received.extend(arguments))
    try:
        run()
    finally:
        hook.remove()
    if len(received) != 1 or not isinstance(received[0], Tensor):
        raise FedadcError(f"head: {type(layer).__name__} must be called once, with one tensor; name another layer.")
    return received[0]


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers of a module."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def running_statistics(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The running means and variances of the BatchNorm layers, by their names in the state dict."""
    norms = [layer for layer in batch_norms(module) if layer.running_mean is not None]
    require(
        all(layer.momentum is not None for layer in norms),
        f"{type(module).__name__} has BatchNorm with momentum=None, whose running statistics are means over all "
        "batches ever seen; give it a momentum, e.g. 0.1.",
    )
    own = {id(statistic) for layer in norms for statistic in (layer.running_mean, layer.running_var)}
    return [(name, buffer) for name, buffer in module.named_buffers() if id(buffer) in own]


def counters(module: nn.Module) -> set[int]:
    """The ids of the buffers that count batches, which BatchNorm with a momentum does not use."""
    return {id(layer.num_batches_tracked) for layer in batch_norms(module) if layer.num_batches_tracked is not None}


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Copies of a module's buffers, which have their values again afterwards."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield before
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in before:
                    buffer.copy_(before[name])
