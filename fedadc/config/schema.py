"""Convert a tree of plain values to frozen dataclasses and back, by one rule for every node of a config.

A node is a dataclass (`build`), or an entry of a table, `{name: ..., settings}` (`choose`), or a leaf that pydantic
checks strictly against its annotation. Unknown keys and names are errors that suggest the most similar known one.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from fedadc.errors import FedadcError, one_line, require, spelled, unknown
from fedadc.fields.values import accepts_none, hints_of, leaf, without_none
from fedadc.fields.values import show as _show
from fedadc.system.plugins import load_plugin, plugin_name, plugin_names
from fedadc.system.user_code import UserCode

__all__ = ["Schema", "Tables", "hints_of", "leaf"]
T = TypeVar("T")
Tables = Mapping[type, Mapping[str, Any]]  # base class -> name -> class


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
                if value is None and not accepts_none(hints.get(key, Any)) and not _is_required(fields[key]):
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
        except FedadcError as error:
            raise FedadcError(_at(where, str(error), fields)) from error
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
        name = known_name(where, name, table)
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
        inner = without_none(hint)
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


def known_name(where: str, name: str, table: Mapping[str, Any]) -> str:
    """The name of an entry of a table or of a plugin as it is written there, whatever its case here."""
    return name if name in table or ":" in name else spelled(name, [*table, *plugin_names(where)])


def _is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _at(where: str, message: str, fields: Collection[str]) -> str:
    """The message of a dataclass about its fields, with their place in the config: local.steps must be ..."""
    begins_with_a_field = re.split(r"\W", message, maxsplit=1)[0] in fields
    return message if not where else f"{where}.{message}" if begins_with_a_field else f"{where}: {message}"
