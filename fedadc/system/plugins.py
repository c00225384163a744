"""Plugins: what an installed package offers for a config under a name, declared as an entry point.

The names come from the metadata of the packages. A package is imported only when a config names one of its plugins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any

from fedadc.errors import FedadcError, one_line, require

KINDS = {  # config key -> the end of the group's name: method plugins are in the group fedadc.methods
    "method": "methods", "objective": "objectives", "model": "models", "data": "datasets",
    "cohort.selection": "selections", "data.partition": "partitions",
}  # fmt: skip


def plugins(kind: str) -> dict[str, list[EntryPoint]]:
    """The plugins of a kind by name. A name may be declared by several packages."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in _entry_points(kind, tuple(sys.path)):
        if ":" not in entry.name:  # module:Name is always a file
            found.setdefault(entry.name, []).append(entry)
    return found


@cache
def _entry_points(kind: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=f"fedadc.{kind}"))


def package_of(entry: EntryPoint) -> str:
    """The package that declares a plugin, with its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.module


def plugin_names(where: str) -> Iterable[str]:
    """The names of the plugins for a config key."""
    return plugins(KINDS[where]) if where in KINDS else ()


def load_plugin(where: str, name: str) -> Any:
    """Import the plugin of this name for a config key; None if no package declares it."""
    entries = plugins(KINDS[where]).get(name, []) if where in KINDS else []
    if not entries:
        return None
    packages = " and ".join(sorted(map(package_of, entries)))
    require(len(entries) == 1, f"{where}: the plugin {name} is declared by {packages}; uninstall all but one.")
    try:
        return entries[0].load()
    except FedadcError:
        raise
    except Exception as error:
        raise FedadcError(
            f"{where}: loading the plugin {name} of {packages} failed ({type(error).__name__}: {one_line(error)})."
        ) from error


def plugin_name(cls: type) -> str | None:
    """The name under which a package declares a class as a plugin. Its module is imported, since the class exists."""
    for kind in KINDS.values():
        for name, entries in plugins(kind).items():
            if any(_declared(entry) is cls for entry in entries):
                return name
    return None


def _declared(entry: EntryPoint) -> Any:
    try:
        return attrgetter(entry.attr)(sys.modules[entry.module])
    except (AttributeError, KeyError, TypeError):  # not imported, or an entry without an attribute
        return None
