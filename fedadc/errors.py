"""The one exception a user's mistake raises, and the sentences that name what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedadcError(Exception):
    """A mistake in a config, a file or an argument. Its text is one sentence meant for the user."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise FedadcError(message)


class Diverged(FedadcError):
    """Training has left the finite numbers."""


class CannotResume(FedadcError):
    """The run in a directory cannot go on as it was asked to; nothing in it was changed."""


def unknown(kind: str, name: object, known: Iterable[str]) -> FedadcError:
    """An error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(names)}." if names else "there are none."
    return FedadcError(f"{kind} {str(name)!r} is unknown; {hint}")


def one_line(error: BaseException) -> str:
    """Another library's message, as part of a sentence of ours."""
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
