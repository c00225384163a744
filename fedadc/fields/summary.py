"""Short texts about objects: at most three lines, whatever an object holds, and nothing is computed for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from types import FunctionType
from typing import Any

LONGEST = 350  # characters of a summary
LONGEST_PART = 100  # characters of a value in it
FIRST = 3  # entries that are shown of a list or a mapping


def summary(name: str, facts: Mapping[str, Any]) -> str:
    """`Name(fact=value, ...)`, without the facts that are None or empty, and without functions."""
    shown = ", ".join(f"{key}={short(value)}" for key, value in facts.items() if not _is_empty(value))
    text = f"{name}({shown})"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 2]}…)"


def field_summary(self: Any) -> str:
    """The `__repr__` of a dataclass that holds tensors or long lists."""
    return summary(type(self).__name__, {k: v for k, v in vars(self).items() if not k.startswith("_")})


def short(value: Any) -> str:
    """A value in a few words; of tensors and arrays the type and the shape, of others their first entries."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str | PurePath):
        return _cut(repr(str(value)), "…'")
    if type(value) is dict:
        return "{" + _first([f"{key}: {short(item)}" for key, item in _head(value.items())], len(value)) + "}"
    if type(value) in (list, tuple):
        return f"[{_first([short(item) for item in _head(value)], len(value))}]"
    text = repr(value)
    return text if len(text) <= LONGEST_PART else f"{type(value).__name__}(…)"


def _head(values: Any) -> list[Any]:
    return [value for _, value in zip(range(FIRST), values, strict=False)]


def _first(shown: list[str], count: int) -> str:
    return ", ".join(shown) + (f", … {count} in all" if count > FIRST else "")


def _cut(text: str, end: str) -> str:
    return text if len(text) <= LONGEST_PART else text[: LONGEST_PART - len(end)] + end


def _is_empty(value: Any) -> bool:
    empty = isinstance(value, str | tuple | list | dict) and not value
    return value is None or empty or isinstance(value, FunctionType)


def short_number(value: float, digits: int = 4) -> str:
    """A number with so many decimals; from ten thousand on as 1.234e5, which is short whatever its size."""
    if abs(value) < 1e4:
        return f"{value:.{digits}f}"
    mantissa, _, exponent = f"{value:.{max(digits - 1, 1)}e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa
