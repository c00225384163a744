"""Flat vectors and named tensors: the types that methods return, and checks of what they returned."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedadc.errors import FedadcError, require

Vector = Tensor  # one flat vector, as long as theta
State = dict[str, Tensor]  # named tensors, passed in and out, never kept


def vector_like(value: Any, like: Vector, source: str) -> Vector:
    """What a method returned, if it is a vector like theta; torch would silently stretch a single number to one."""
    if isinstance(value, Tensor) and value.shape == like.shape and value.dtype == like.dtype:
        return value
    shown = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    raise FedadcError(f"{source} must return a vector like theta, {list(like.shape)} {like.dtype}, not {shown}.")


def state_of(value: Any, source: str) -> State:
    """What a method returned, if it is a dict of named tensors."""
    require(isinstance(value, dict), f"{source} must return a dict of named tensors, not {type(value).__name__}.")
    for name, tensor in value.items():
        kind = type(tensor).__name__
        require(
            isinstance(tensor, Tensor), f"{source} must return a dict of named tensors, but {name!r} is of type {kind}."
        )
    return value  # type: ignore[no-any-return]


def canonical(state: State) -> State:
    """The same by name and in one piece, as a file gives it back: neither order nor strides are part of a value."""
    return {name: state[name].contiguous() for name in sorted(state)}


def pair_of(value: Any, source: str) -> tuple[Any, Any]:
    require(isinstance(value, tuple) and len(value) == 2, f"{source} must return two values.")
    return value  # type: ignore[no-any-return]
