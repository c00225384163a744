"""Check one value strictly against its annotation; the error says in plain words what it must be.

Strictly: no text for a number, no 3.0 or True for a whole number. A list may stand for a tuple, and NumPy's numbers for
Python's.
"""

from __future__ import annotations

import functools
import json
import reprlib
import types
import typing
from collections.abc import Sequence
from datetime import date
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from fedadc.errors import FedadcError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

PLAIN_WORDS = {  # type of a pydantic error -> what the value must be
    "int_type": "a whole number", "float_type": "a number", "string_type": "a text", "bool_type": "true or false",
    "list_type": "a list", "tuple_type": "a list", "dict_type": "a mapping of keys", "none_required": "empty",
}  # fmt: skip
EXACT = (int, float, str, bool, types.NoneType)  # a value of such a type fits; one of a subclass may not, such as True
NOT_OBVIOUS = object()


def leaf(hint: Any, value: Any, where: str) -> Any:
    """The value as its annotation wants it. It is checked as JSON, in which a list may stand for a tuple."""
    if (found := _plain(hint, value)) is not NOT_OBVIOUS:
        return found
    from pydantic import PydanticSchemaGenerationError, ValidationError  # takes long to import

    try:
        text = json.dumps(value, default=_as_json)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise FedadcError(f"{where} must be a plain value, not {show(value)}.") from None
    try:
        return _adapter(hint).validate_json(text, strict=True)
    except ValidationError as error:
        raise FedadcError(_sentence(error.errors(), value, where)) from error
    except PydanticSchemaGenerationError:
        return value  # a user-defined type: its constructor checks the value


def _plain(hint: Any, value: Any) -> Any:
    """The value if it obviously fits, which is fast and needs no pydantic; else NOT_OBVIOUS."""
    if isinstance(value, str) and not value.isascii():  # it may have characters that no file can have
        return NOT_OBVIOUS
    if isinstance(value, int) and value.bit_length() > 63:  # it may be too long to be printed
        return NOT_OBVIOUS
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value if type(value) is str and value in parts else NOT_OBVIOUS
    if (origin is Sequence or parts[1:] == (...,)) and type(value) in (list, tuple):
        items = [_plain(parts[0], item) for item in value]
        return NOT_OBVIOUS if NOT_OBVIOUS in items else items if origin is Sequence else tuple(items)
    for part in parts if origin in (typing.Union, types.UnionType) else ():
        if (found := _plain(part, value)) is not NOT_OBVIOUS:
            return found
    return value if hint in EXACT and type(value) is hint else NOT_OBVIOUS


def _sentence(errors: Sequence[Any], value: Any, where: str) -> str:
    first = errors[0]
    inside = _indices(first["loc"])
    here = [e for e in errors if _indices(e["loc"]) == inside]  # several for a union of types
    words = [PLAIN_WORDS.get(e["type"]) or e.get("ctx", {}).get("expected") for e in here]
    if None in words:
        return f"{where}{inside}: {first['msg'][:1].lower()}{first['msg'][1:]}, not {show(value)}."
    shown = show(first["input"] if inside else value)
    return f"{where}{inside} must be {' or '.join(dict.fromkeys(words))}, not {shown}."


def show(value: Any) -> str:
    """A value as part of a sentence: one line, cut if it is long."""
    try:
        return " ".join(reprlib.repr(value).split())
    except (ValueError, RecursionError):  # an integer with thousands of digits, or deep nesting
        return f"an unprintable {type(value).__name__}"


def hints_of(thing: Any) -> dict[str, Any]:
    """The annotations of a class or function; empty if they use names that exist only for type checkers."""
    try:
        return typing.get_type_hints(thing)
    except (NameError, TypeError, AttributeError):
        return {}


def without_none(hint: Any) -> Any:
    """X for the annotation `X | None`; any other annotation as it is."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        others = [a for a in typing.get_args(hint) if a is not type(None)]
        if len(others) == 1:
            return others[0]
    return hint


def accepts_none(hint: Any) -> bool:
    return hint is Any or type(None) in typing.get_args(hint)


@functools.lru_cache(maxsize=200)
def _cached_adapter(hint: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(hint)
    except TypeError:  # an annotation that cannot be a key, such as Annotated[int, []]
        return _cached_adapter.__wrapped__(hint)


def _as_json(value: Any) -> Any:
    """What json cannot write by itself: NumPy's numbers and arrays, paths and dates."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, PurePath | date):
        return str(value)
    raise TypeError


def _indices(location: Sequence[int | str]) -> str:
    return "".join(f"[{i}]" for i in location if isinstance(i, int))
