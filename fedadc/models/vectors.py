"""The types that methods return (flat vectors and named tensors), and checks of returned values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from torch import Tensor

from fedadc.errors import FedadcError, require

Vector = Tensor  # one flat vector, as long as theta
State = dict[str, Tensor]  # named tensors; methods receive and return them, but never store them


class DistantState(Mapping[str, Tensor]):
    """A state that another process keeps. It is fetched when its tensors are asked for."""

    size: int  # bytes

    @abstractmethod
    def fetch(self) -> State:
        """The tensors, as `canonical` has them."""

    def __getitem__(self, name: str) -> Tensor:
        return self.fetch()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fetch())

    def __len__(self) -> int:
        return len(self.fetch())

    def __bool__(self) -> bool:
        return True

    def keys(self) -> KeysView[str]:  # these fetch once, not once per tensor
        return self.fetch().keys()

    def values(self) -> ValuesView[Tensor]:
        return self.fetch().values()

    def items(self) -> ItemsView[str, Tensor]:
        return self.fetch().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.fetch(),)


def vector_like(value: Any, like: Vector, source: str) -> Vector:
    """Return `value` if it is a vector like theta; torch would silently broadcast a single number to one."""
    if isinstance(value, Tensor) and value.shape == like.shape and value.dtype == like.dtype:
        return value
    shown = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    raise FedadcError(f"{source} must return a vector like theta, {list(like.shape)} {like.dtype}, not {shown}.")


def state_of(value: Any, source: str) -> State:
    """Return `value` if it is a dict of named tensors."""
    require(isinstance(value, dict), f"{source} must return a dict of named tensors, not {type(value).__name__}.")
    for name, tensor in value.items():
        kind = type(tensor).__name__
        require(
            isinstance(tensor, Tensor), f"{source} must return a dict of named tensors, but {name!r} has type {kind}."
        )
    return value  # type: ignore[no-any-return]


def canonical(state: State) -> State:
    """The state sorted by name and with contiguous tensors, as it would be read from a file."""
    return {name: state[name].contiguous() for name in sorted(state)}


def pair_of(value: Any, source: str) -> tuple[Any, Any]:
    """Return `value` if it is a tuple of two values."""
    require(isinstance(value, tuple) and len(value) == 2, f"{source} must return two values.")
    return value  # type: ignore[no-any-return]
