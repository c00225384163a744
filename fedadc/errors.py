"""The one exception a user's mistake raises, and the sentences that name what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LONGEST = 2000  # characters of a message


class FedadcError(Exception):
    """A mistake in a config, a file or an argument. Its text is one sentence meant for the user.

    Names and fields of a stranger's files stand in such sentences: what cannot be printed is written as Python would,
    so that a message is one line, drives no terminal and fits any encoding of the machine's.
    """

    def __init__(self, text: str) -> None:
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
        super().__init__(text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


def require(condition: bool, message: str) -> None:
    if not condition:
        raise FedadcError(message)


def undefined(owner: object, method: str) -> FedadcError:
    """Of a user's own class that lacks what its base asks for."""
    return FedadcError(f"{type(owner).__name__} must define {method}.")


def require_types(node: Any, name: str, *kinds: type) -> None:
    """The first fields of a dataclass, each an instance of its kind."""
    for (field, value), kind in zip(vars(node).items(), kinds, strict=False):
        require(isinstance(value, kind), f"{name}.{field} must be a {kind.__name__}, not {value!r:.60}.")


def require_file(path: Path, what: str) -> None:
    """A regular file: a pipe or a device may never end."""
    try:
        require(path.is_file(), f"{what}: {f'{path} is not a file' if path.exists() else f'there is no file {path}'}.")
    except OSError as error:  # a name that is too long, a folder that is not ours to look into
        raise FedadcError(f"{what}: {path} cannot be read ({error.strerror}).") from error


class Diverged(FedadcError):
    """Training has left the finite numbers."""


class CannotResume(FedadcError):
    """The run in a directory cannot go on as it was asked to; nothing in it was changed."""


def unknown(kind: str, name: object, known: Iterable[str]) -> FedadcError:
    """An error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    listed = ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")
    hint = f"did you mean {near[0]!r}?" if near else f"known are: {listed}." if names else "there are none."
    return FedadcError(f"{kind} {str(name)!r} is unknown; {hint}")


def one_line(error: BaseException) -> str:
    """Another library's message, as part of a sentence of ours."""
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
