"""Errors in a worker, on their way to the process that started it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from fedadc.errors import FedadcError, explained, one_line, same_kind


@dataclass(frozen=True)
class Failure:
    where: str
    error: FedadcError | None  # None for a bug
    trace: str


def failure_of(doing: str, error: Exception) -> Failure:
    """A failure during a job. Call it where the exception is caught."""
    error.add_note(f"in {doing}")
    known = explained(error)
    sent = None if known is None else same_kind(known, str(known))  # of a class that can be unpickled
    return Failure(doing, sent, traceback.format_exc())


def failure_to_start(error: Exception) -> Failure:
    reason = FedadcError(
        f"a worker process cannot load the model, the method or the objective ({one_line(error)}): "
        "define them in a file, or at the top level of a script that is one; workers=0 works without."
    )
    return Failure("the start of a worker", reason, traceback.format_exc())


def error_of(failure: Failure) -> Exception:
    """The exception to raise for a failure."""
    if failure.error is not None:
        error = failure.error
        error.add_note(f"in {failure.where}")
        error.add_note(f"in a worker process:\n{failure.trace}")
        return error
    return RuntimeError(f"{failure.where} failed in a worker process:\n{failure.trace}")
