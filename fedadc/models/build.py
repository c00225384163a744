"""From a name and options to an initialized module that is known to work on the data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedadc.errors import FedadcError, one_line, require, require_file, unknown
from fedadc.rng import torch_seeded

INITS = ("default", "kaiming")
TYPES = frozenset(  # of a weights file: those of parameters, and of buffers that count or mask
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
SETTINGS = ("name", "seed", "init", "weights", "channels_last")  # of any model


def construct(
    cls: type[nn.Module],
    options: Mapping[str, Any],
    input_shape: tuple[int, ...],
    classes: int,
    seed: int,
    init: str = "default",
) -> nn.Module:
    """Build a module; `input_shape` and `classes` go to constructors that have parameters of these names."""
    parameters = inspect.signature(cls).parameters
    given = {"input_shape": input_shape, "classes": classes}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in options:
        require(key not in given, f"model.{key} is not a setting: it comes from the data.")
        if key not in parameters and not open_ended:
            raise unknown("model: key", key, {*parameters, *SETTINGS} - set(given))
    arguments = dict(options) | {k: v for k, v in given.items() if k in parameters}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [n for n, p in parameters.items() if p.default is p.empty and p.kind in named and n not in arguments]
    require(not missing, f"model: {cls.__name__} needs {', '.join(missing)}; give it beside model.name.")
    with torch_seeded(seed, "model"):
        try:
            module = cls(**arguments)
        except FedadcError:
            raise
        except Exception as error:  # a stranger's constructor, or sizes that torch refuses
            shown = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
            raise FedadcError(f"model: {cls.__name__}({shown}) failed: {one_line(error)}.") from error
        initialize(module, init)
    return module


def initialize(module: nn.Module, init: str) -> None:
    """`default` keeps the constructor's weights; `kaiming` draws them again from torch's seeded generator.

    Kaiming-normal for ReLU: fan-out for convolutions, fan-in for linear layers, zero biases.
    """
    if init == "default":
        return
    if init != "kaiming":
        raise unknown("model.init", init, INITS)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fan: Literal["fan_in", "fan_out"] = "fan_out" if isinstance(layer, nn.Conv2d) else "fan_in"
            nn.init.kaiming_normal_(layer.weight, mode=fan, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def probe(module: nn.Module, x: Tensor, classes: int, seed: int = 0) -> None:
    """Refuse a module that cannot be trained here: wrong output, or buffers that change while it trains."""
    name = type(module).__name__
    before = {n: b.clone() for n, b in module.named_buffers()}
    training = module.training
    module.train()
    try:
        with torch.no_grad(), torch_seeded(seed, "probe"):
            logits = module(x)
    except Exception as error:  # whatever a stranger's forward raises is his to read, in one sentence
        raise FedadcError(
            f"model {name} fails on a batch of shape {list(x.shape)} from this data: {one_line(error)}."
        ) from error
    finally:
        module.train(training)
    changed = [n for n, b in module.named_buffers() if not torch.equal(b, before.get(n, b))]
    for n, b in module.named_buffers():
        if n in before:
            b.copy_(before[n])
    require(
        not changed,
        f"model {name} changes its buffers while it trains ({', '.join(changed[:2])}): running statistics such as "
        "BatchNorm's are not averaged in federated learning; use GroupNorm instead.",
    )
    shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    require(
        shape == [len(x), classes],
        f"model {name} must return logits of shape [{len(x)}, {classes}] for {len(x)} samples of {classes} classes; "
        f"it returned {shape}.",
    )


def prefers_channels_last(module: nn.Module, x: Tensor, pixel_by_pixel: Tensor, seed: int = 0) -> bool:
    """Whether a module convolves images, which is quicker pixel by pixel, and says the same of them in that format."""
    if not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False

    def said_of(images: Tensor) -> Tensor:
        with torch.no_grad(), torch_seeded(seed, "probe"):
            logits: Tensor = module(images)
            return logits

    try:
        return torch.allclose(said_of(x), said_of(pixel_by_pixel), rtol=1e-3, atol=1e-4)
    except Exception:  # `view`, for one, knows only the usual format; what else is wrong `probe` will say
        return False


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from a safetensors file, every number in it finite."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    require_file(path, "model.weights")
    try:
        state: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise FedadcError(f"model.weights: {path} is not a safetensors file ({one_line(error)}).") from error
    for name, tensor in state.items():
        require(tensor.dtype in TYPES, f"{path}: {name} has the type {tensor.dtype}, which is not one of weights.")
        strange = torch.nonzero(~torch.isfinite(tensor))
        if len(strange):
            at = strange[0].tolist()
            raise FedadcError(f"{path}: {name}{at} is {tensor[tuple(at)].item()}; weights must be finite.")
    return state
