"""The layers of a module that federated training treats apart: its head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fedadc.errors import FedadcError, unknown


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
