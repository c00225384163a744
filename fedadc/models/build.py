"""Build and initialize a module from its settings, and check that it works on the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedadc.errors import DataError, FedadcError, kind_of_failure, one_line, require, require_file, unknown
from fedadc.models.parts import batch_norms, buffers_kept
from fedadc.rng import torch_seeded
from fedadc.tasks import Task

INITS = ("default", "kaiming")
WEIGHT_TYPES = frozenset(  # accepted in a weights file: types of parameters, and of buffers that count or mask
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
COMMON_SETTINGS = ("name", "head", "seed", "init", "weights", "channels_last")  # every model has them


def require_maker(maker: object, name: str) -> None:
    """Refuse what is neither a class of torch modules nor a function."""
    right = issubclass(maker, nn.Module) and maker is not nn.Module if isinstance(maker, type) else callable(maker)
    require(
        right,
        f"model.name: {name} is not a class derived from Module, nor a function that returns a torch module.",
    )


def construct(
    maker: Callable[..., nn.Module],
    options: Mapping[str, Any],
    input_shape: tuple[int, ...],
    classes: int,
    seed: int,
    init: str = "default",
) -> nn.Module:
    """Build a module with its class or a function; `input_shape` and `classes` are passed if it has such parameters."""
    parameters, name = inspect.signature(maker).parameters, getattr(maker, "__name__", "the model")
    from_data = {"input_shape": input_shape, "classes": classes}
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in options:
        require(key not in from_data, f"model.{key} is not a setting: it comes from the data.")
        if key not in parameters and not any_keyword:
            raise unknown("model: key", key, {*parameters, *COMMON_SETTINGS} - set(from_data))
    arguments = dict(options) | {k: v for k, v in from_data.items() if k in parameters}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [n for n, p in parameters.items() if p.default is p.empty and p.kind in named and n not in arguments]
    require(not missing, f"model: {name} needs {', '.join(missing)}; add it to the model settings.")
    with torch_seeded(seed, "model"):
        try:
            module = maker(**arguments)
        except FedadcError:
            raise
        except Exception as error:  # user code may raise anything, and torch refuses some sizes
            shown = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
            raise FedadcError(f"model: {name}({shown}) failed: {one_line(error)}.") from error
        made = type(module).__name__
        require(isinstance(module, nn.Module), f"model: {name} must return a torch module, not a value of type {made}.")
        initialize(module, init)
    return module


def initialize(module: nn.Module, init: str) -> None:
    """Initialize the weights: `default` keeps the constructor's, `kaiming` draws new ones from torch's generator.

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


def probe(module: nn.Module, x: Tensor, task: Task, seed: int = 0, keeps_norms: bool = False) -> None:
    """Raise a FedadcError if a module fails, has the wrong output shape, or changes its buffers in training.

    With `keeps_norms`, clients keep BatchNorm layers with their statistics, so these may change.
    """
    name, training = type(module).__name__, module.training
    module.train()
    with buffers_kept(module) as before:
        try:
            with torch.no_grad(), torch_seeded(seed, "probe"):
                logits = module(x)
        except Exception as error:  # user code may raise anything
            raise FedadcError(
                f"model {name} fails on a batch of shape {list(x.shape)} from this data: {one_line(error)}."
            ) from error
        finally:
            module.train(training)
        kept = {id(b) for layer in batch_norms(module) for b in layer.buffers()} if keeps_norms else set()
        changed = [n for n, b in module.named_buffers() if id(b) not in kept and not torch.equal(b, before.get(n, b))]
    require(
        not changed,
        f"model {name} changes its buffers during training ({', '.join(changed[:2])}), but running statistics such as "
        "BatchNorm's are not averaged in federated learning; use GroupNorm instead, or method fedbn, with which every "
        "client keeps its own BatchNorm.",
    )
    shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    wanted, (kind, labels) = [len(x), *task.outputs], task.words
    require(
        shape == wanted,
        f"model {name} must return {kind} of shape {wanted} for {len(x)} samples of {labels}; it returned {shape}.",
    )


def needs_whole_numbers(module: nn.Module, x: Tensor, seed: int = 0) -> bool:
    """True if a module fails on these floating-point inputs, and works on them as whole numbers, as embeddings do."""
    if not torch.equal(x, x.round()):
        return False

    def works(inputs: Tensor) -> bool:
        try:
            with torch.no_grad(), torch_seeded(seed, "probe"):
                module(inputs)
        except Exception:  # `probe` reports failures
            return False
        return True

    training = module.training
    module.eval()
    try:
        return not works(x) and works(x.long())
    finally:
        module.train(training)


def prefers_channels_last(module: nn.Module, x: Tensor, pixel_by_pixel: Tensor, seed: int = 0) -> bool:
    """True if a module has convolutions, which are faster with channels last, and its logits are the same there."""
    if not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False

    def predict(images: Tensor) -> Tensor:
        with torch.no_grad(), torch_seeded(seed, "probe"), buffers_kept(module):
            logits: Tensor = module(images)
            return logits

    try:
        return torch.allclose(predict(x), predict(pixel_by_pixel), rtol=1e-3, atol=1e-4)
    except Exception:  # `view`, for example, needs the default format; `probe` reports other failures
        return False


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict from a safetensors file and check that all its numbers are finite."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    require_file(path, "model.weights")
    try:
        state: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise kind_of_failure(error)(f"model.weights: {path} is not a safetensors file ({one_line(error)}).") from error
    for name, tensor in state.items():
        require(
            tensor.dtype in WEIGHT_TYPES,
            f"{path}: {name} has the type {tensor.dtype}, which is not used for weights.",
            DataError,
        )
        not_finite = torch.nonzero(~torch.isfinite(tensor))
        if len(not_finite):
            index = not_finite[0].tolist()
            raise DataError(f"{path}: {name}{index} is {tensor[tuple(index)].item()}; weights must be finite.")
    return state
