"""All public names: those of `fedadc` itself and of its namespaces."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import fedadc


def public_objects() -> dict[str, Any]:
    """By name without the namespace."""
    found: dict[str, Any] = {}
    for name in fedadc.__all__:
        value = getattr(fedadc, name)
        if isinstance(value, ModuleType):
            found |= {inner: getattr(value, inner) for inner in getattr(value, "__all__", ())}
        else:
            found[name] = value
    return found
