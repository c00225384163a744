"""Dataclasses of plain values as JSON, and back. What is read is checked as if a stranger had written it."""

from __future__ import annotations

from typing import Any, TypeVar

from fedadc.errors import DataError, one_line, require

MAX_TEXT = 1 << 26  # bytes of a summary or a schema
Value = TypeVar("Value")


def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter  # takes long to import

    return TypeAdapter(cls)


def to_json(value: Any) -> bytes:
    """A summary or a schema as text; equal values give equal bytes."""
    text: bytes = _adapter(type(value)).dump_json(value)
    return text


def from_json(cls: type[Value], text: bytes, source: str) -> Value:
    """The value in a text from elsewhere; `source` names it in messages."""
    require(len(text) <= MAX_TEXT, f"{source} gave {len(text):,} bytes; at most {MAX_TEXT:,} are read.", DataError)
    try:
        value: Value = _adapter(cls).validate_json(text, strict=False)
    except (ValueError, RecursionError, DataError) as error:
        errors: Any = getattr(error, "errors", list)()  # pydantic's
        place = ".".join(map(str, errors[0]["loc"])) if errors else ""
        reason = f"{place}: {errors[0]['msg']}" if place else one_line(error)
        raise DataError(f"{source} gave what cannot be read ({reason:.160}).") from None
    return value
