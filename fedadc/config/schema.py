"""Convert a tree of plain values to frozen dataclasses and back, by one rule for every node of a config.

A node is a dataclass (`build`), or an entry of a table, `{name: ..., settings}` (`choose`), or a leaf that pydantic
checks strictly against its annotation. Unknown keys and names are errors that suggest the most similar known one.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from fedadc.errors import FedadcError, one_line, require, unknown
from fedadc.system.plugins import load_plugin, plugin_name, plugin_names
from fedadc.system.user_code import UserCode

T = TypeVar("T")
Tables = Mapping[type, Mapping[str, Any]]  # base class -> name -> class
PLAIN_WORDS = {  # type of a pydantic error -> what the value must be
    "int_type": "a whole number", "float_type": "a number", "string_type": "a text", "bool_type": "true or false",
    "list_type": "a list", "tuple_type": "a list", "dict_type": "a mapping of keys",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Schema:
    """The tables that a config chooses from, and the user's own code that it may name as `module:Class`."""

    tables: Tables
    code: UserCode
    # further names to suggest when a name is unknown
    extra_names: Mapping[type, Sequence[str]] = dataclasses.field(default_factory=dict)

    def build(self, cls: type[T], tree: Any, where: str = "") -> T:
        """Build a dataclass from a mapping. A field with metadata `rest` collects the keys that are no other field."""
        if isinstance(tree, str) and "name" in {f.name for f in dataclasses.fields(cls)}:  # type: ignore[arg-type]
            tree = {"name": tree}
        require(isinstance(tree, Mapping), f"{where or 'the config'} must be a mapping of keys, not {_show(tree)}.")
        hints = hints_of(cls)
        fields = {f.name: f for f in dataclasses.fields(cls) if f.metadata.get("config", True)}  # type: ignore[arg-type]
        rest = next((name for name, f in fields.items() if f.metadata.get("rest")), None)
        values: dict[str, Any] = {rest: {}} if rest else {}
        for key, value in tree.items():
            path = f"{where}.{key}" if where else str(key)
            if key in fields and key != rest:
                if value is None and not _accepts_none(hints.get(key, Any)) and not _is_required(fields[key]):
                    continue  # an empty node means its default
                values[key] = self._value(hints.get(key, Any), value, path)
            elif rest:
                values[rest][key] = value
            else:
                self._reject_key(cls, key, fields, where)
        for name, f in fields.items():
            if _is_required(f) and name not in values:
                example = f"; write e.g. {name}: {f.metadata['example']}" if "example" in f.metadata else ""
                raise FedadcError(f"{f'{where}.{name}' if where else name} is missing{example}.")
        try:
            return cls(**values)
        except FedadcError:
            raise
        except Exception as error:  # raised by a user-defined class
            raise FedadcError(f"{where}: {cls.__name__} rejects its settings: {one_line(error)}.") from error

    def choose(self, base: type[T], tree: Any, where: str) -> T:
        """Build an entry of a table, or a user-defined class, from its name or from {name: ..., settings}."""
        if isinstance(tree, str):
            tree = {"name": tree}
        of_number = getattr(base, "of_number", None)  # defined by base classes that accept a bare number
        if of_number is not None and isinstance(tree, int | float) and not isinstance(tree, bool):
            tree = of_number(tree)
        require(isinstance(tree, Mapping), f"{where} must be a name or {{name: ..., settings}}, not {_show(tree)}.")
        require(
            "name" in tree, f"{where}.name is missing; choose from: {', '.join(self.tables[base])}, or module:Class."
        )
        cls = self.lookup(where, tree["name"], self.tables[base], base)
        declared = {n for n, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)}
        require(
            not declared or "__dataclass_fields__" in cls.__dict__,
            f"{where}: {cls.__name__} is not a dataclass; put @dataclass(frozen=True, kw_only=True) above it.",
        )
        chosen: T = self.build(cls, {k: v for k, v in tree.items() if k != "name"}, where)
        return chosen

    def lookup(self, where: str, name: Any, table: Mapping[str, Any], base: type | None = None) -> Any:
        """Find an entry of a table by its name, or a plugin, or a user-defined object by `module:Name`."""
        require(isinstance(name, str), f"{where}.name must be a string, not {_show(name)}.")
        if name in table:
            return table[name]
        found = self.code.load(name, where) if ":" in name else load_plugin(where, name)
        if found is None:
            extra = self.extra_names.get(base, ()) if base else ()
            raise unknown(f"{where}.name", name, {*table, *extra, *plugin_names(where)})
        if base is not None:
            require(
                isinstance(found, type) and issubclass(found, base) and found is not base,
                f"{where}.name: {name} is not a class derived from {base.__name__}.",
            )
        return found

    def _value(self, hint: Any, value: Any, where: str) -> Any:
        inner = _without_none(hint)
        if value is None and inner is not hint:
            return None
        if inner in self.tables:
            return self.choose(inner, value, where)
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            return self.build(inner, value, where)
        return leaf(hint, value, where)

    def _reject_key(self, cls: type, key: Any, fields: Mapping[str, Any], where: str) -> None:
        reason = getattr(cls, "refused", {}).get(key)
        if reason is not None:
            raise FedadcError(f"{where}.{key} is not supported here: {reason}.")
        if not fields:
            raise FedadcError(f"{where}: key {str(key)!r} is unknown; there are no settings here, remove it.")
        raise unknown(f"{where}: key" if where else "key", key, fields)

    def dump(self, value: Any) -> Any:
        """The tree that `build` would turn into this value."""
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return list(value) if isinstance(value, tuple) else value
        tree: dict[str, Any] = {}
        for base, table in self.tables.items():
            if isinstance(value, base):
                tree["name"] = name_in(table, type(value))
        for f in dataclasses.fields(value):
            if f.metadata.get("rest"):
                tree |= getattr(value, f.name)
            elif f.metadata.get("config", True):
                tree[f.name] = self.dump(getattr(value, f.name))
        return tree


def name_in(table: Mapping[str, Any], cls: type) -> str:
    """The name of a class in a config: that of the table or of a plugin, else `module:Class`."""
    names = [name for name, entry in table.items() if entry is cls]
    return names[0] if names else plugin_name(cls) or f"{cls.__module__}:{cls.__qualname__}"


def leaf(hint: Any, value: Any, where: str) -> Any:
    """Check a value strictly against its annotation. It is checked as JSON, in which a list may stand for a tuple."""
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise FedadcError(f"{where}: {_show(value)} is not a plain value.") from None
    try:
        return TypeAdapter(hint).validate_json(text, strict=True)
    except ValidationError as error:
        first, *others = error.errors()
        inside = _indices(first["loc"])
        kinds = [e["type"] for e in (first, *others) if _indices(e["loc"]) == inside]  # several for a union of types
        if not all(kind in PLAIN_WORDS for kind in kinds):
            raise FedadcError(f"{where}{inside}: {_lower(first['msg'])}, not {_show(value)}.") from error
        plain = " or ".join(dict.fromkeys(PLAIN_WORDS[kind] for kind in kinds))
        shown = _show(first["input"] if inside else value)
        raise FedadcError(f"{where}{inside} must be {plain}, not {shown}.") from error
    except PydanticSchemaGenerationError:
        return value  # a user-defined type: its constructor checks the value


def hints_of(thing: Any) -> dict[str, Any]:
    """The annotations of a class or function; empty if they use names that exist only for type checkers."""
    try:
        return typing.get_type_hints(thing)
    except (NameError, TypeError, AttributeError):
        return {}


def _is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _accepts_none(hint: Any) -> bool:
    return hint is Any or type(None) in typing.get_args(hint)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        others = [a for a in typing.get_args(hint) if a is not type(None)]
        if len(others) == 1:
            return others[0]
    return hint


def _indices(location: Sequence[int | str]) -> str:
    return "".join(f"[{i}]" for i in location if isinstance(i, int))


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _show(value: Any) -> str:
    try:
        return " ".join(reprlib.repr(value).split())
    except (ValueError, RecursionError):  # an integer with thousands of digits, or deep nesting
        return f"an unprintable {type(value).__name__}"
