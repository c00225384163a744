"""The exceptions that are reported in one sentence, their exit codes, and helpers that build their messages."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Mapping
from pathlib import Path

MAX_MESSAGE_LENGTH = 2000  # characters
BUG = 1  # the exit code of an exception that no sentence explains: its traceback is shown


class FedadcError(Exception):
    """Wrong usage or a mistake in a config, and the base of all errors. Its text is one sentence meant for the user.

    Messages may quote names from files that cannot be trusted. Unprintable characters are therefore escaped: a message
    is one line, contains no terminal control sequences and can be printed in any encoding.
    """

    exit_code = 2  # of the command that ends with this error

    def __init__(self, text: str) -> None:
        text = text if len(text) <= MAX_MESSAGE_LENGTH else f"{text[:MAX_MESSAGE_LENGTH]} …"
        super().__init__(text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


class Diverged(FedadcError):
    """Training has produced values that are not finite."""

    exit_code = 3


class DiskError(FedadcError):
    """A disk is full, or a file or folder cannot be written, or not be read for lack of permission."""

    exit_code = 4


class DataError(FedadcError):
    """A file that is needed is missing or damaged, or data cannot be used."""

    exit_code = 5


class WorkersLost(FedadcError):
    """Worker processes died and replacing them did not help. The last checkpoint is kept."""

    exit_code = 6


class StatesLost(WorkersLost):
    """States of clients were lost with the node of a cluster that had them. The last checkpoint has earlier ones."""


class CannotResume(FedadcError):
    """The run in a directory cannot be resumed as requested; nothing in the directory was changed."""


class RunDamaged(CannotResume, DataError):
    """The run in a directory cannot be resumed because files of it are missing or damaged."""


def require(condition: bool, message: str, kind: type[FedadcError] = FedadcError) -> None:
    if not condition:
        raise kind(message)


def _numbers(*names: str) -> set[int]:
    return {getattr(errno, name) for name in names if hasattr(errno, name)}  # Windows lacks some


DISK_PROBLEMS = _numbers(
    *("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EFBIG", "EIO", "ENXIO", "ENODEV", "ESTALE", "EMFILE", "ENFILE")
)
PATH_PROBLEMS = _numbers("ENOENT", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP")  # there is no such file


def kind_of_failure(cause: object, otherwise: type[FedadcError] = DataError) -> type[FedadcError]:
    """The error to raise where reading or writing fails: DiskError for a disk or permission problem."""
    return DiskError if isinstance(cause, OSError) and cause.errno in DISK_PROBLEMS else otherwise


def explained(error: BaseException) -> FedadcError | None:
    """The error that one sentence explains to the user; None for a bug, which needs its traceback."""
    if isinstance(error, FedadcError):
        return error
    if isinstance(error, MemoryError) or "not enough memory" in str(error):  # torch raises a RuntimeError
        return FedadcError("out of memory; choose a smaller model or less data.")
    ours = not getattr(error, "__notes__", None)  # notes: it was raised by a user's method at a client, or by `watch`
    if ours and isinstance(error, OSError) and error.errno in DISK_PROBLEMS | PATH_PROBLEMS:
        return kind_of_failure(error)(f"{one_line(error)}.")
    return None


def same_kind(error: FedadcError, message: str) -> FedadcError:
    """An error with the exit code of another one. A user's subclass becomes the class of ours that it derives from."""
    kind: type[FedadcError] = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    return kind(message)


def undefined(owner: object, method: str) -> FedadcError:
    """An error for a user-defined class that lacks a method which its base class requires."""
    return FedadcError(f"{type(owner).__name__} must define {method}.")


def article(kind: type) -> str:
    """The name of a type with its article: "an int", "a Dataset"."""
    name = kind.__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def require_file(path: Path, what: str, kind: type[FedadcError] = DataError) -> None:
    """Require a regular file: reading from a pipe or a device may never end."""
    try:
        if not path.is_file():
            problem = f"{path} is not a file" if path.exists() else f"there is no file {path}"
            raise kind(f"{what}: {problem}.")
    except OSError as error:  # a name that is too long, a folder without read permission
        raise kind_of_failure(error, kind)(f"{what}: {path} cannot be read ({error.strerror}).") from error


def spelled(name: str, names: Iterable[str]) -> str:
    """The one of `names` that `name` is, whatever its case; `name` itself if it is none of them, or more than one."""
    known = list(names)
    alike = [name] if name in known else [other for other in known if other.casefold() == name.casefold()]
    return alike[0] if len(alike) == 1 else name


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
    close += difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.7)
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
