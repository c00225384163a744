"""The base class of all settings: frozen dataclasses that refuse a value whose type does not fit its annotation.

Configs are checked in the same way, by `leaf`. Messages name a field alone ("steps must be ..."); a config puts the
path of its node before it ("local.steps must be ...").
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fedadc.errors import FedadcError, article
from fedadc.fields.values import EXACT, hints_of, leaf, show, without_none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that check the types of their fields. Subclasses call `super().__post_init__()`, then check ranges."""

    def __post_init__(self, *_: Any) -> None:  # a subclass may have fields that are passed here (`InitVar`)
        values = vars(self)
        for name, hint, exact in _checked_fields(type(self)):
            value = values.get(name)
            if type(value) not in exact and name in values and not _fits(hint, value):
                values[name] = _converted(hint, value, name)


Checked = list[tuple[str, Any, set[Any]]]  # name of a field, its annotation, types whose values fit in any case
_CHECKED: WeakKeyDictionary[type, Checked] = WeakKeyDictionary()


def _checked_fields(cls: type[Settings]) -> Checked:
    """The fields whose annotations are understood; a user-defined class may have fields of any other type."""
    if cls not in _CHECKED:
        hints = hints_of(cls)
        known = ((f.name, hints[f.name]) for f in dataclasses.fields(cls) if f.name in hints)
        _CHECKED[cls] = [
            (name, hint, {part for part in _alternatives(hint) if part in EXACT})
            for name, hint in known
            if all(map(_is_understood, _leaves(hint)))
        ]
    return _CHECKED[cls]


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """int and str for the annotation `int | str`."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _leaves(hint: Any) -> Iterator[Any]:
    """The parts of an annotation such as `tuple[int, ...] | None` that have no parts themselves."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple, list, dict):
        for part in typing.get_args(hint):
            yield from _leaves(part)
    else:
        yield hint


def _is_understood(hint: Any) -> bool:
    return hint in (*EXACT, Any, Path, ...) or typing.get_origin(hint) is typing.Literal or _is_settings(hint)


def _is_settings(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Settings)


def _fits(hint: Any, value: Any) -> bool:
    """True if a value needs neither an error message nor a conversion; this is fast and needs no pydantic."""
    if hint is Any:
        return True
    if isinstance(hint, type):
        return isinstance(value, hint) if hint is Path or _is_settings(hint) else type(value) is hint
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return any(value is choice or (type(value) is str and value == choice) for choice in parts)
    if origin is tuple:
        return type(value) is tuple and parts[1:] == (...,) and all(_fits(parts[0], item) for item in value)
    if origin is dict:
        return type(value) is dict and parts == (str, Any)
    return any(_fits(part, value) for part in _alternatives(hint) if part is not hint)


def _converted(hint: Any, value: Any, name: str) -> Any:
    """What an annotation makes of a value, such as a tuple of a list; an error if the value does not fit."""
    wanted = without_none(hint)
    if not _is_settings(wanted):
        return leaf(hint, value, name)
    given = f"the class {value.__name__}; add ()" if isinstance(value, type) else show(value)
    raise FedadcError(f"{name} must be {article(wanted)}, not {given}.")
