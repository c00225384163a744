"""A trained model as a program that needs no fedadc: for torch.export, and as ONNX. Its inputs are raw.

The program normalizes its inputs with the operations of `fedadc.data.batches`, in the same order, so that its outputs
have the same bits. Traces of the source are left out of the files: they name folders of the machine that wrote them.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fedadc.data.batches import Inputs
from fedadc.errors import FedadcError, one_line, require

PROGRAM_INPUT, PROGRAM_OUTPUT = "x", "outputs"  # the names in an ONNX file
EXAMPLES = 2  # samples in the batch that is traced; with a single one, the size of batches would be fixed
ONNX_PACKAGES = ("onnx", "onnxscript")


class FromRaw(nn.Module):
    """A module behind the normalization of its inputs."""

    mean: Tensor
    std: Tensor

    def __init__(self, module: nn.Module, inputs: Inputs, channels_last: bool) -> None:
        super().__init__()
        constants = inputs.normalization
        self.module, self.channels_last = module, channels_last
        self.normalized, self.scale = bool(constants.mean), constants.scale
        if self.normalized:  # in units of the raw inputs, as `Normalization` has them
            for name in ("mean", "std"):
                self.register_buffer(name, torch.tensor(getattr(constants, name), dtype=inputs.dtype) * constants.scale)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of the module for raw inputs."""
        if self.channels_last:  # explicit strides, as in `Inputs`: one channel would look the same in both formats
            n, c, h, w = x.shape
            x = torch.empty_strided((n, c, h, w), (h * w * c, 1, w * c, c), dtype=x.dtype, device=x.device).copy_(x)
        if self.normalized:
            shape = (-1, *[1] * (x.ndim - 2))
            x = (x - self.mean.view(shape)) / self.std.view(shape)
        elif self.scale != 1:
            x = x / self.scale
        outputs: Tensor = self.module(x)
        return outputs


def torch_program(module: nn.Module, inputs: Inputs, shape: tuple[int, ...], channels_last: bool) -> Any:
    """The `torch.export.ExportedProgram` of a module, for batches of any size of raw inputs of this shape."""
    raw = FromRaw(module, inputs, channels_last).eval().requires_grad_(False).cpu()
    example = torch.zeros((EXAMPLES, *shape), dtype=inputs.kind)
    try:
        with _quiet():
            program = torch.export.export(raw, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # user code may do what cannot be traced
        raise FedadcError(
            f"model {type(module).__name__} cannot be exported as a program ({one_line(error)[:300]}); "
            "the format state_dict is always possible."
        ) from error
    for node in program.graph.nodes:
        for key in ("stack_trace", "nn_module_stack"):
            node.meta.pop(key, None)
    return program


def torch_bytes(program: Any) -> bytes:
    """The content of a .pt2 file. It has no pickled tensors."""
    stream = io.BytesIO()
    with _quiet():
        torch.export.save(program, stream)
    return stream.getvalue()


def onnx_bytes(program: Any) -> bytes:
    """The content of an ONNX file."""
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    require(not missing, f"ONNX needs {' and '.join(missing)}; install them with `pip install 'fedadc[onnx]'`.")
    try:
        with _quiet():
            found = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=[PROGRAM_INPUT], output_names=[PROGRAM_OUTPUT]
            )
    except Exception as error:  # an operation that ONNX does not have
        raise FedadcError(
            f"the model cannot be written as ONNX ({one_line(error)[:300]}); use the format torch or state_dict."
        ) from error
    model: Any = found.model_proto  # type: ignore[union-attr]
    for entry in (model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output):
        del entry.metadata_props[:]  # names of torch's own functions, and traces
    content: bytes = model.SerializeToString(deterministic=True)
    return content


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks to its own developers."""
    log = logging.getLogger("torch")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
