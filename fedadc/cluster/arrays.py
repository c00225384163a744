"""Tensors as NumPy arrays: Ray's object store shares those between all processes of a node, without copies."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedadc.models.vectors import State

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array | tuple[Array, str]]  # a type that NumPy lacks is stored as integers, with its name
STORED_AS = {torch.bfloat16: torch.int16}


def to_arrays(state: Mapping[str, Tensor]) -> Arrays:
    return {name: _to_array(tensor) for name, tensor in state.items()}


def to_tensors(arrays: Arrays, device: torch.device | None = None) -> State:
    """Copies in memory that torch has aligned: the bits of products may depend on it."""
    views = {name: view(array) for name, array in arrays.items()}
    return {name: tensor.to(device or "cpu", copy=True) for name, tensor in views.items()}


def bytes_of(arrays: Arrays) -> int:
    return sum((array if isinstance(array, np.ndarray) else array[0]).nbytes for array in arrays.values())


def _to_array(tensor: Tensor) -> Array | tuple[Array, str]:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in STORED_AS:
        return tensor.view(STORED_AS[tensor.dtype]).numpy(), str(tensor.dtype).removeprefix("torch.")
    array: Array = tensor.numpy()
    return array


def view(array: Array | tuple[Array, str]) -> Tensor:
    """A tensor in the memory of an array, which must not be written to."""
    plain, dtype = (array, "") if isinstance(array, np.ndarray) else array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(plain)
    return tensor.view(getattr(torch, dtype)) if dtype else tensor
