"""The exceptions for user mistakes, and helpers that build their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

MAX_MESSAGE_LENGTH = 2000  # characters


class FedadcError(Exception):
    """A mistake in a config, a file or an argument. Its text is one sentence meant for the user.

    Messages may quote names from files that cannot be trusted. Unprintable characters are therefore escaped: a message
    is one line, contains no terminal control sequences and can be printed in any encoding.
    """

    def __init__(self, text: str) -> None:
        text = text if len(text) <= MAX_MESSAGE_LENGTH else f"{text[:MAX_MESSAGE_LENGTH]} …"
        super().__init__(text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


def require(condition: bool, message: str) -> None:
    if not condition:
        raise FedadcError(message)


def undefined(owner: object, method: str) -> FedadcError:
    """An error for a user-defined class that lacks a method which its base class requires."""
    return FedadcError(f"{type(owner).__name__} must define {method}.")


def article(kind: type) -> str:
    """The name of a type with its article: "an int", "a Dataset"."""
    name = kind.__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def require_file(path: Path, what: str) -> None:
    """Require a regular file: reading from a pipe or a device may never end."""
    try:
        if not path.is_file():
            problem = f"{path} is not a file" if path.exists() else f"there is no file {path}"
            raise FedadcError(f"{what}: {problem}.")
    except OSError as error:  # a name that is too long, a folder without read permission
        raise FedadcError(f"{what}: {path} cannot be read ({error.strerror}).") from error


class Diverged(FedadcError):
    """Training has produced values that are not finite."""


class CannotResume(FedadcError):
    """The run in a directory cannot be resumed as requested; nothing in the directory was changed."""


def unknown(kind: str, name: object, choices: Iterable[str]) -> FedadcError:
    """An error for a name that does not exist. It suggests the most similar existing name, or lists all names."""
    names = sorted(choices)
    near = _similar(str(name), names)
    listed = ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")
    hint = f"did you mean {near[0]!r}?" if near else f"choose from: {listed}." if names else "there are no others."
    return FedadcError(f"{kind} {str(name)!r} is unknown; {hint}")


def _similar(name: str, names: list[str]) -> list[str]:
    """The names that differ little from `name`, or only in the order of letters; else the one that begins with it."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    close += [other for other in names if sorted(other) == sorted(name)]
    longer = [other for other in names if other.startswith(name)]
    return close or (longer if len(longer) == 1 else [])


def one_line(error: BaseException) -> str:
    """Another library's error message, formatted as part of a sentence."""
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")


def require_new_names(cls: type, base: str, renamed: Mapping[str, str]) -> None:
    """Refuse a user's class that still defines an attribute under the name of an earlier version."""
    for old, new in renamed.items():
        if old in vars(cls):
            raise FedadcError(f"{cls.__name__}.{old}: {base}.{old} is now called {new}; rename it.")
